// Another placement for a running model.
#include <algorithm>
#include <limits>

#include "engine/trainer.hpp"

namespace layerstream {
namespace {

/// Whether an engine would be made alike: limits and rates only say how the placement was found.
bool places_alike(RunConfig a, const RunConfig& b) {
  a.device_memory_limit = b.device_memory_limit;
  a.host_memory_limit = b.host_memory_limit;
  a.hardware_profile = b.hardware_profile;
  return config_yaml(a) == config_yaml(b);
}

}  // namespace

/// A request that waits already was meant for an earlier process: its run may be another by now.
void Trainer::await_requests() {
  const RunConfig& run = config_.run;
  requests_.emplace(run.output_dir);
  try {
    if (!requests_->take()) return;
    log_.warning("{} in {} was meant for a process that has ended; it is not carried out",
                 ReplanRequests::waiting_name, run.output_dir);
    settle(ReplanRequests::Outcome::refused);
  } catch (const FileError& error) {
    log_.warning("{}; requests for another placement are not looked for", error.what());
    requests_.reset();
  }
}

void Trainer::settle(ReplanRequests::Outcome outcome) {
  try {
    requests_->settle(outcome);
  } catch (const std::exception& error) {
    log_.warning("{}", error.what());
  }
}

void Trainer::replan_if_asked() {
  if (!requests_) return;
  std::optional<std::string> request;
  try {
    request = requests_->take();
  } catch (const FileError& error) {
    log_.warning("{}; requests for another placement are no longer looked for", error.what());
    requests_.reset();
    return;
  }
  if (request) carry_out(*request);
}

void Trainer::carry_out(const std::string& request) {
  const std::size_t former_limit = device_.memory_limit();
  const auto refuse = [&](std::string_view why) {
    device_.set_memory_limit(former_limit);
    log_.warning("re-plan after step {} refused, the run goes on as it was: {}", state_.global_step, why);
    settle(ReplanRequests::Outcome::refused);
  };
  LoadedConfig wanted;
  Placement placement;
  // All that can be refused is refused while the engine stands.
  try {
    const LoadedConfig given = parse_replan_request(request, ReplanRequests::waiting_name);
    wanted = with_request(config_, given);
    check_config(wanted);
    // A GPU is shared: what was free at the start may be gone.
    if (!device_.uses_host_memory() || given.origins.contains("device_memory_limit")) {
      device_.set_memory_limit(std::min<std::size_t>(
          wanted.run.device_memory_limit.value_or(std::numeric_limits<std::size_t>::max()),
          device_.attainable_memory()));
    }
    const Ledger& held = engine_->ledger();
    placement =
        placement_of(wanted.run, data_bytes(),
                     held.total(Space::host) + (device_.uses_host_memory() ? held.total(Space::device) : 0));
  } catch (const std::exception& error) {
    return refuse(error.what());
  }
  if (places_alike(placement.run, placement_.run)) {
    log_.info("re-plan after step {}: the placement stays what it is", state_.global_step);
  } else {
    const std::string failure = move_to(placement.run, former_limit);
    if (!engine_) {
      log_.warning("re-plan after step {} given up: {}", state_.global_step, failure);
      return settle(ReplanRequests::Outcome::refused);
    }
    if (!failure.empty()) return refuse(failure);
    log_.info("re-plan after step {}: placed anew", state_.global_step);
    log_placement();
  }
  config_ = std::move(wanted);
  placement_ = std::move(placement);
  expect_timeline();
  write_record();
  settle(ReplanRequests::Outcome::applied);
}

/// Takes the engine apart and makes another around its state: nothing is held twice. Says why the former
/// placement had to be taken up again or, after a stop request, why there is no engine; empty if all went
/// well.
std::string Trainer::move_to(const RunConfig& placed, std::size_t former_limit) {
  engine_->apply_pending();
  state_memory_ = Engine::release_state(std::move(engine_));
  std::string failure;
  try {
    engine_ = make_engine(placed, state_memory_);
  } catch (const Interrupted& stop) {
    return stop.what();
  } catch (const std::exception& error) {
    failure = error.what();
  }
  if (!engine_) {
    log_.warning("re-plan: {}; back to the former placement", failure);
    device_.set_memory_limit(former_limit);
    try {
      engine_ = make_engine(placement_.run, state_memory_);
    } catch (const Interrupted& stop) {
      return stop.what();
    } catch (const std::exception& error) {
      end_without_engine(fmt::format("{}; and no way back: {}", failure, error.what()));
    }
  }
  state_memory_.reset();
  return failure;
}

void Trainer::end_without_engine(std::string_view why) {
  std::string kept;
  std::string problems;
  try {
    // Of a run without a step there is nothing to keep.
    if (state_.global_step > first_step_) kept = save().string();
  } catch (const std::exception& error) {
    problems = fmt::format("; saving: {}", error.what());
  }
  try {
    const auto newest = kept.empty() ? io::newest_complete(config_.run.output_dir) : std::nullopt;
    if (newest) kept = newest->path.string();
  } catch (const std::exception& error) {
    problems += fmt::format("; looking for checkpoints: {}", error.what());
  }
  settle(ReplanRequests::Outcome::refused);
  throw Error(fmt::format(
      "re-plan after step {} failed: {}{}; {}", state_.global_step, why, problems,
      kept.empty() ? "no checkpoint is known"
                   : kept + " is the newest checkpoint: resume_from_checkpoint: auto goes on from it"));
}

}  // namespace layerstream
