#include "doctor/check.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <exception>

namespace layerstream::doctor {
namespace {

using Clock = std::chrono::steady_clock;

Finding examine(const Check& check, const Patient& patient) {
  if (check.needs_device && patient.device == nullptr) {
    return {.verdict = Verdict::not_applicable, .found = "no device"};
  }
  try {
    return check.run(patient);
  } catch (const std::exception& error) {
    return {.verdict = Verdict::fail,
            .found = fmt::format("stopped: {}", error.what()),
            .expected = "an answer",
            .remedy = "what the message says; where that does not help, report it with --output"};
  }
}

}  // namespace

std::string_view name_of(Verdict verdict) {
  switch (verdict) {
    case Verdict::ok:
      return "ok";
    case Verdict::warn:
      return "warn";
    case Verdict::fail:
      return "FAIL";
    case Verdict::not_applicable:
      return "not applicable";
  }
  return "?";
}

std::string Outcome::to_text() const {
  std::string text = fmt::format("{}: {}\n", name, name_of(finding.verdict));
  const auto line = [&](std::string_view label, const std::string& what) {
    if (!what.empty()) text += fmt::format("  {:<9} {}\n", label, what);
  };
  line("found", finding.found);
  line("expected", finding.expected);
  line("remedy", finding.remedy);
  return text;
}

std::vector<Outcome> run_checks(const std::vector<Check>& checks, const Patient& patient,
                                const std::function<void(const Outcome&)>& told) {
  std::vector<Outcome> outcomes;
  for (const Check& check : checks) {
    const auto start = Clock::now();
    Outcome outcome{.name = check.name, .finding = examine(check, patient)};
    outcome.seconds = std::chrono::duration<double>(Clock::now() - start).count();
    if (told) told(outcome);
    outcomes.push_back(std::move(outcome));
  }
  return outcomes;
}

int count(const std::vector<Outcome>& outcomes, Verdict verdict) {
  return static_cast<int>(std::ranges::count_if(
      outcomes, [&](const Outcome& outcome) { return outcome.finding.verdict == verdict; }));
}

std::string summary(const std::vector<Outcome>& outcomes) {
  std::string text = fmt::format("{} checks:", outcomes.size());
  for (const Verdict verdict : {Verdict::ok, Verdict::warn, Verdict::fail, Verdict::not_applicable}) {
    text += fmt::format("{} {} {}", verdict == Verdict::ok ? "" : ",", count(outcomes, verdict),
                        name_of(verdict));
  }
  for (const Verdict verdict : {Verdict::fail, Verdict::warn}) {
    std::string names;
    for (const Outcome& outcome : outcomes) {
      if (outcome.finding.verdict == verdict) names += (names.empty() ? "" : ", ") + outcome.name;
    }
    if (!names.empty()) text += fmt::format("; {}: {}", name_of(verdict), names);
  }
  return text;
}

}  // namespace layerstream::doctor
