#include "core/cuda/nvrtc.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <link.h>
#include <nvrtc.h>

#include <climits>
#include <memory>

#include "core/cuda/symbols.h"
#include "core/problem/check.h"

namespace cudnn_autotune {
namespace {

struct Nvrtc {
  decltype(&nvrtcVersion) version = nullptr;
  decltype(&nvrtcCreateProgram) create = nullptr;
  decltype(&nvrtcDestroyProgram) destroy = nullptr;
  decltype(&nvrtcCompileProgram) compile = nullptr;
  decltype(&nvrtcGetProgramLogSize) log_size = nullptr;
  decltype(&nvrtcGetProgramLog) log = nullptr;
  decltype(&nvrtcGetCUBINSize) cubin_size = nullptr;
  decltype(&nvrtcGetCUBIN) cubin = nullptr;
  decltype(&nvrtcGetErrorString) error_string = nullptr;

  // Throws PlanError, in each call anew.
  static const Nvrtc& instance() {
    static const Nvrtc nvrtc;
    return nvrtc;
  }

 private:
  Nvrtc();
};

// The folder of site-packages; empty if torch is not there.
std::string site_packages() {
  void* torch = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  char folder[PATH_MAX + 1];
  if (torch == nullptr || dlinfo(torch, RTLD_DI_ORIGIN, folder) != 0) return "";
  return std::string(folder) + "/../..";
}

void* open_library() {
  const std::string major = std::to_string(CUDART_VERSION / 1000);
  const std::string name = "libnvrtc.so." + major;
  if (void* loaded = dlopen(name.c_str(), RTLD_NOW | RTLD_NOLOAD)) return loaded;
  const std::string wheels = site_packages() + "/nvidia/";
  for (const std::string& folder : {wheels + "cu" + major + "/lib/",  // of CUDA 13
                                    wheels + "cuda_nvrtc/lib/", std::string()}) {
    if (void* opened = dlopen((folder + name).c_str(), RTLD_NOW | RTLD_LOCAL)) return opened;
  }
  throw PlanError("NVRTC is not there: " + std::string(dlerror()));
}

Nvrtc::Nvrtc() {
  void* library = open_library();
  const auto bind = [library](auto& function, const char* name) {
    if (!bind_symbol(library, name, function)) throw PlanError(std::string("NVRTC has no ") + name);
  };
  bind(version, "nvrtcVersion");
  bind(create, "nvrtcCreateProgram");
  bind(destroy, "nvrtcDestroyProgram");
  bind(compile, "nvrtcCompileProgram");
  bind(log_size, "nvrtcGetProgramLogSize");
  bind(log, "nvrtcGetProgramLog");
  bind(cubin_size, "nvrtcGetCUBINSize");
  bind(cubin, "nvrtcGetCUBIN");
  bind(error_string, "nvrtcGetErrorString");
}

void check(nvrtcResult result, const std::string& what) {
  if (result == NVRTC_SUCCESS) return;
  throw PlanError(what + ": " + Nvrtc::instance().error_string(result));
}

std::string log_of(nvrtcProgram program) {
  const Nvrtc& nvrtc = Nvrtc::instance();
  size_t size = 0;
  if (nvrtc.log_size(program, &size) != NVRTC_SUCCESS || size <= 1) return "";
  std::string log(size, '\0');
  if (nvrtc.log(program, log.data()) != NVRTC_SUCCESS) return "";
  log.resize(size - 1);  // without the NUL at its end
  return "\n" + log;
}

}  // namespace

std::pair<int, int> nvrtc_version() {
  std::pair<int, int> version;
  check(Nvrtc::instance().version(&version.first, &version.second), "asking NVRTC its version");
  return version;
}

std::string compile_kernel(const std::string& source, const std::string& function,
                           const std::vector<std::string>& options) {
  const Nvrtc& nvrtc = Nvrtc::instance();
  const std::string what = "compiling " + function;
  nvrtcProgram created = nullptr;
  check(nvrtc.create(&created, source.c_str(), (function + ".cu").c_str(), 0, nullptr, nullptr),
        what);
  const auto destroy = [&nvrtc](nvrtcProgram program) { nvrtc.destroy(&program); };
  const std::unique_ptr<_nvrtcProgram, decltype(destroy)> program(created, destroy);
  std::vector<const char*> texts;
  for (const std::string& option : options) texts.push_back(option.c_str());
  const nvrtcResult result =
      nvrtc.compile(program.get(), static_cast<int>(texts.size()), texts.data());
  if (result != NVRTC_SUCCESS) {
    throw PlanError(what + ": " + nvrtc.error_string(result) + log_of(program.get()));
  }
  size_t size = 0;
  check(nvrtc.cubin_size(program.get(), &size), what);
  std::string cubin(size, '\0');
  if (size > 0) check(nvrtc.cubin(program.get(), cubin.data()), what);
  // The name of the kernel's section, which ends with a NUL.
  if (cubin.find(".text." + function + '\0') == std::string::npos) {
    throw PlanError(what +
                    ": the source has no extern \"C\" __global__ function of this name, or "
                    "no option names an architecture such as sm_90");
  }
  return cubin;
}

}  // namespace cudnn_autotune
