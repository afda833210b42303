#include "core/cudnn/engine_config.h"

#include <charconv>
#include <stdexcept>
#include <string_view>

#include "core/cudnn/detail/knob_names.h"

namespace cudnn_autotune {
namespace {

constexpr std::string_view kUnfused = "unfused:";

[[noreturn]] void does_not_parse(const std::string& text, const std::string& why) {
  throw std::invalid_argument("engine_text: '" + text + "' does not parse: " + why +
                              "; expected e.g. 'eng0' or 'eng67:KERNEL_CFG=3,WORKSPACE=0'");
}

int64_t parse_number(const std::string& text, const char* begin, const char* end) {
  int64_t number = 0;
  const auto [last, error] = std::from_chars(begin, end, number);
  if (begin == end || error != std::errc() || last != end) {
    does_not_parse(text, "'" + std::string(begin, end) + "' is not a whole number");
  }
  return number;
}

}  // namespace

std::string EngineConfig::text() const {
  std::string t(is_unfused ? kUnfused : "");
  t += "eng" + std::to_string(engine);
  char separator = ':';
  for (const auto& [knob, value] : knobs) {
    t += separator + knob + "=" + std::to_string(value);
    separator = ',';
  }
  return t;
}

EngineConfig EngineConfig::parse(const std::string& text) {
  EngineConfig config;
  config.is_unfused = text.rfind(kUnfused, 0) == 0;
  const size_t start = config.is_unfused ? kUnfused.size() : 0;
  if (text.compare(start, 3, "eng") != 0) does_not_parse(text, "it does not begin with 'eng'");
  const size_t colon = text.find(':', start);
  const size_t engine_end = colon == std::string::npos ? text.size() : colon;
  config.engine = parse_number(text, text.data() + start + 3, text.data() + engine_end);
  if (config.engine < 0) does_not_parse(text, "an engine's number is 0 or more");
  if (colon == std::string::npos) return config;
  size_t begin = colon + 1;
  while (true) {
    const size_t comma = text.find(',', begin);
    const size_t end = comma == std::string::npos ? text.size() : comma;
    const size_t equals = text.find('=', begin);
    if (equals == std::string::npos || equals >= end) {
      does_not_parse(text, "'" + text.substr(begin, end - begin) + "' is not KNOB=value");
    }
    const std::string knob = text.substr(begin, equals - begin);
    const auto number = knob_by_name(knob);
    if (!number) does_not_parse(text, "'" + knob + "' is not a knob");
    const int64_t value = parse_number(text, text.data() + equals + 1, text.data() + end);
    if (!config.knobs.emplace(knob_name(*number), value).second) {
      does_not_parse(text, "the knob '" + knob + "' is given twice");
    }
    if (comma == std::string::npos) return config;
    begin = comma + 1;
  }
}

}  // namespace cudnn_autotune
