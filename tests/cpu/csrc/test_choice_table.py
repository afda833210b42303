"""The table of choices, in C++: what a thread has cached is stale when its own problem changes."""

from __future__ import annotations

from pathlib import Path

from support.processes import csrc_programs

PROGRAM = r"""
#include <atomic>
#include <thread>
#include <vector>

#include "core/choices/choice_table.h"

using namespace cudnn_autotune;

ChoiceKey key(int64_t batch, int32_t limit = 0) {
  ChoiceKey made;
  made.problem.x[0] = batch;
  made.policy.benchmark_limit = limit;
  return made;
}

int main() {
  auto& table = ChoiceTable::instance();
  const ChoiceKey one = key(1), other_policy = key(1, 5), two = key(2);
  REQUIRE(!ChoiceVersion().is_current());
  const auto put = [&](const ChoiceKey& k, const char* text) {
    return table.put_unless_forgotten(k, text, table.find(k).version);
  };

  // A problem's change is seen under each of its policies, and by no other problem.
  ChoiceVersion a = put(one, "eng1"), b = put(other_policy, "eng2"), c = put(two, "eng3");
  REQUIRE(a.is_current() && b.is_current() && c.is_current());
  REQUIRE(put(one, "eng1").is_current() && a.is_current());  // the same text again changes nothing
  table.forget(one.problem);
  REQUIRE(!a.is_current() && !b.is_current() && c.is_current());
  REQUIRE(!table.find(one).text && !table.find(other_policy).text);
  REQUIRE(table.find(two).text == "eng3" && table.find(two).version.is_current());

  // So is another text, and a config that no longer builds; but not where it was replaced already.
  a = put(one, "eng1");
  ChoiceVersion changed = put(one, "eng4");
  REQUIRE(!a.is_current() && changed.is_current() && c.is_current());
  table.erase(one, "eng1");
  REQUIRE(changed.is_current() && table.find(one).text == "eng4");
  table.erase(one, "eng4");
  REQUIRE(!changed.is_current() && !table.find(one).text && c.is_current());

  // What was asked for before a problem was forgotten is not put; what merely changed is.
  ChoiceVersion asked = table.find(one).version;
  put(one, "eng1");
  put(one, "eng5");
  REQUIRE(!asked.is_current());
  REQUIRE(table.put_unless_forgotten(one, "eng6", asked).is_current());
  table.forget(two.problem);
  REQUIRE(table.put_unless_forgotten(one, "eng7", asked).is_current());
  table.forget(one.problem);
  REQUIRE(!table.put_unless_forgotten(one, "eng8", asked).is_current() && !table.find(one).text);
  REQUIRE(!table.put_unless_forgotten(one, "eng8", ChoiceVersion()).is_current());
  REQUIRE(!table.find(one).text);

  // All at once, also what nobody has chosen yet, and what is asked for twice over it.
  a = put(one, "eng1"), c = put(two, "eng3");
  asked = table.find(key(3)).version;
  table.forget_all();
  REQUIRE(!a.is_current() && !c.is_current() && !asked.is_current());
  put(key(3), "eng9");
  REQUIRE(!table.put_unless_forgotten(key(3), "eng10", asked).is_current());
  REQUIRE(table.find(key(3)).text == "eng9" && !a.is_current());

  // Many threads: what was found before a forgetting never holds after it.
  std::atomic<int64_t> forgotten{0};
  std::atomic<bool> is_over{false};
  ChoiceVersion bystander = put(two, "eng3");
  std::vector<std::thread> readers;
  for (int i = 0; i < 3; ++i) {
    readers.emplace_back([&] {
      while (!is_over) {
        const ChoiceVersion found = put(one, "eng1");
        const int64_t before = forgotten;
        // Of two that are counted after it, the second was begun after it.
        while (forgotten < before + 2 && !is_over) std::this_thread::yield();
        REQUIRE(forgotten < before + 2 || !found.is_current());
        REQUIRE(bystander.is_current());
      }
    });
  }
  for (int i = 0; i < 2000; ++i) {
    table.forget(one.problem);
    ++forgotten;
    std::this_thread::yield();
  }
  is_over = true;
  for (auto& reader : readers) reader.join();
  REQUIRE(bystander.is_current());
}
"""


@csrc_programs.needs_compiler
def test_what_stands(tmp_path: Path) -> None:
    files = ("problem/activation.cpp", "problem/conv_problem.cpp", "choices/choice_table.cpp")
    csrc_programs.run(tmp_path, PROGRAM, files)
