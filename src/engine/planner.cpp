#include "engine/planner.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "core/config_schema.hpp"
#include "core/error.hpp"
#include "engine/engine.hpp"
#include "engine/longest_row.hpp"
#include "profiles/hardware/shipped_profiles.hpp"

namespace layerstream {
namespace {

/// A point of the search: what the planner decides but for resident_blocks, which is always as many as fit.
struct Choice {
  std::int64_t weight_slots;
  LoopOrder loop_order;
  ActivationPolicy activation_policy;
  std::int64_t activation_blocks;
  std::int64_t activation_chunks;
  std::int64_t device_activation_blocks;
  int share_percent;  ///< of each streamed block's update, the device's
  bool gradients_on_host;
  bool updates_in_place;
  friend auto operator<=>(const Choice&, const Choice&) = default;
};

/// The keys that a placement consists of.
std::vector<ConfigField> placement_fields() {
  std::vector<ConfigField> fields = config_schema();
  std::erase_if(fields, [](const ConfigField& field) {
    return field.section != "Placement" || field.key == "hardware_profile";
  });
  return fields;
}

class Search {
 public:
  Search(const ModelSpec& spec, const RunConfig& config, const Machine& machine, std::size_t data_bytes)
      : given_(config),
        machine_(machine),
        backend_(make_backend(config, machine.device)),
        shape_(make_engine_shape(spec, config, EngineMode::train, machine.device)),
        most_resident_(most_resident_blocks(shape_.layout)) {
    add_process_lines(process_, data_bytes, machine.engine_bytes);
    chunks_ = uniform_chunk_plan(config.per_device_train_batch_size * config.gradient_accumulation_steps,
                                 config.cutoff_len, *config.chunk_tokens);
    for (const ChunkGroup& group : chunks_.groups) {
      chunks_of_row_ = std::max<std::int64_t>(chunks_of_row_, group.num_chunks);
    }
  }

  bool any_fits() {
    return std::ranges::any_of(smallest(), [&](const Choice& choice) { return most_resident(choice) >= 0; });
  }

  Plan best() {
    std::vector<std::pair<double, Choice>> starts;
    for (const Choice& choice : starting_points()) {
      const Choice legal = obeying(choice);
      starts.emplace_back(seconds(legal), legal);
    }
    std::ranges::sort(starts);
    if (!std::isfinite(starts.front().first)) refuse();
    std::pair<double, Choice> best = starts.front();
    // From the best few, and from the best of each kind: no single change leads from one kind to another for
    // the better.
    constexpr std::size_t most_descents = 3;
    std::set<std::tuple<bool, std::int64_t, ActivationPolicy>> kinds;
    for (std::size_t start = 0; start < starts.size(); ++start) {
      const Choice& choice = starts[start].second;
      const bool is_best_of_its_kind =
          kinds.emplace(choice.updates_in_place, choice.device_activation_blocks, choice.activation_policy)
              .second;
      if (start >= most_descents && !is_best_of_its_kind) continue;
      if (std::isfinite(starts[start].first)) best = std::min(best, descend(starts[start]));
    }
    return plan_of(best.second);
  }

 private:
  /// Over a link that is not coherent it loses against copies (benches/results/2026-11-30-coherent-h200.md).
  bool may_update_in_place() const {
    return backend_->kernels_reach_host() && machine_.profile.link.coherent;
  }
  int num_layers() const { return static_cast<int>(shape_.spec.num_hidden_layers); }

  std::vector<Choice> starting_points() {
    using enum ActivationPolicy;
    const std::array<std::pair<ActivationPolicy, std::int64_t>, 4> kept{
        {{all, 0}, {all, num_layers() / 2}, {all, num_layers()}, {input_attention, num_layers() / 2}}};
    std::vector<Choice> points;
    for (const LoopOrder order : {LoopOrder::layer_major, LoopOrder::micro_batch_major}) {
      for (const int on_device : {0, num_layers()}) {
        for (const auto& [policy, blocks] : kept) {
          for (const bool gradients_on_host : {true, false}) {
            for (const bool in_place : {false, true}) {
              if (in_place && !may_update_in_place()) continue;
              points.push_back({.weight_slots = 2,
                                .loop_order = order,
                                .activation_policy = policy,
                                .activation_blocks = blocks,
                                .activation_chunks = chunks_of_row_,
                                .device_activation_blocks = on_device,
                                .share_percent = 50,
                                .gradients_on_host = gradients_on_host,
                                .updates_in_place = in_place});
            }
          }
        }
      }
    }
    for (const Choice& extreme : smallest()) {
      points.push_back(extreme);
      for (const ActivationPolicy policy : {input_attention, all}) {
        points.push_back(with_most_chunks(extreme, policy));
      }
    }
    return points;
  }

  /// What needs the least of the device, what needs the least of the host, and what lies between: activations
  /// and gradients that wait on the device are spared on the host. Whatever fits, one of them does, but for
  /// the grain of the shares.
  const std::vector<Choice>& smallest() {
    if (smallest_.empty()) smallest_ = find_smallest();
    return smallest_;
  }

  std::vector<Choice> find_smallest() {
    std::vector<Choice> all;
    const auto add = [&](const Choice& choice) {
      if (std::ranges::find(all, choice) == all.end()) all.push_back(choice);
    };
    for (int share = 0; share <= 100; share += 5) {
      Choice choice = obeying({.weight_slots = 1,
                               .loop_order = LoopOrder::layer_major,
                               .activation_policy = ActivationPolicy::all,
                               .activation_blocks = 0,
                               .activation_chunks = chunks_of_row_,
                               .device_activation_blocks = 0,
                               .share_percent = share,
                               .gradients_on_host = share == 0,
                               .updates_in_place = false});
      add(choice);
      add(with_most_activations_on_device(choice));
    }
    return all;
  }

  /// As many blocks' activations on the device as it holds beside the choice's other demands.
  Choice with_most_activations_on_device(Choice choice) {
    if (given_.device_activation_blocks) return choice;
    choice.device_activation_blocks = 0;
    const auto [known, is_new] = most_on_device_.emplace(choice, 0);
    if (is_new) known->second = find_most_activations_on_device(choice);
    choice.device_activation_blocks = known->second;
    return choice;
  }

  std::int64_t find_most_activations_on_device(Choice choice) {
    std::int64_t too_many = num_layers() + 1;
    while (too_many - choice.device_activation_blocks > 1) {
      Choice more = choice;
      more.device_activation_blocks += (too_many - choice.device_activation_blocks) / 2;
      if (fits_device(place(config_of(more, given_.resident_blocks.value_or(0))))) {
        choice = more;
      } else {
        too_many = more.device_activation_blocks;
      }
    }
    return choice.device_activation_blocks;
  }

  /// All blocks keep what the policy says, of as many chunks of a row as fit.
  Choice with_most_chunks(Choice choice, ActivationPolicy policy) {
    choice.activation_policy = policy;
    choice.activation_blocks = num_layers();
    const auto with_chunks = [&](std::int64_t chunks) {
      choice.activation_chunks = chunks;
      return with_most_activations_on_device(obeying(choice));
    };
    std::int64_t fitting = 1;
    std::int64_t too_many = chunks_of_row_ + 1;
    while (too_many - fitting > 1) {
      const std::int64_t middle = fitting + (too_many - fitting) / 2;
      (most_resident(with_chunks(middle)) >= 0 ? fitting : too_many) = middle;
    }
    return with_chunks(fitting);
  }

  /// The choice with what the configuration gives, and one of the choices that come to the same.
  Choice obeying(Choice choice) const {
    const auto obey = [](auto& decision, const auto& given) {
      if (given) decision = *given;
    };
    obey(choice.weight_slots, given_.weight_slots);
    obey(choice.loop_order, given_.loop_order);
    obey(choice.activation_policy, given_.activation_policy);
    obey(choice.activation_blocks, given_.activation_blocks);
    obey(choice.activation_chunks, given_.activation_chunks);
    obey(choice.device_activation_blocks, given_.device_activation_blocks);
    obey(choice.gradients_on_host, given_.gradients_on_host);
    obey(choice.updates_in_place, given_.updates_in_place);
    const bool immediate = given_.optimizer_update == OptimizerUpdate::immediate;
    if (immediate || (machine_.device.uses_host_memory() && !given_.optimizer_device_share)) {
      choice.share_percent = 0;
    }
    if (given_.optimizer_device_share) {
      choice.share_percent = static_cast<int>(std::lround(100.0 * *given_.optimizer_device_share));
    }
    choice.activation_blocks = std::min<std::int64_t>(choice.activation_blocks, num_layers());
    choice.activation_chunks = std::min(choice.activation_chunks, chunks_of_row_);
    choice.device_activation_blocks = std::min<std::int64_t>(choice.device_activation_blocks, num_layers());
    // One group: both orders are the same, and layer-major needs less memory.
    if (!given_.loop_order && chunks_.groups.size() == 1) choice.loop_order = LoopOrder::layer_major;
    return choice;
  }

  RunConfig config_of(const Choice& choice, std::int64_t resident_blocks) const {
    RunConfig config = given_;
    config.weight_slots = choice.weight_slots;
    config.loop_order = choice.loop_order;
    config.activation_policy = choice.activation_policy;
    config.activation_blocks = choice.activation_blocks;
    config.activation_chunks = choice.activation_chunks;
    config.device_activation_blocks = choice.device_activation_blocks;
    if (!config.optimizer_device_share) config.optimizer_device_share = choice.share_percent / 100.0;
    config.gradients_on_host = choice.gradients_on_host;
    config.updates_in_place = choice.updates_in_place;
    const HardwareProfile::Link& link = machine_.profile.link;
    if (!config.device_update_blocks) {
      config.device_update_blocks = std::llround(link.adamw_in_place_thread_blocks.value);
    }
    if (!config.promotes_by_kernel) {
      config.promotes_by_kernel = backend_->kernels_reach_host() && link.kernel_read_bytes_per_second.value >
                                                                        link.to_device_bytes_per_second.value;
    }
    config.resident_blocks = resident_blocks;
    return config;
  }

  /// Gives the shape this configuration's placement. Returns what the run would hold.
  Ledger place(const RunConfig& config) {
    shape_.schedule = make_schedule_settings(shape_.layout, config, EngineMode::train, machine_.device);
    Ledger ledger = plan_memory(shape_, *backend_, machine_.device);
    for (const LedgerLine& line : process_.lines()) ledger.add(line.space, line.component, line.bytes);
    return ledger;
  }

  Shortage shortage_of(const Ledger& ledger) const {
    return shortage(ledger, machine_.host, machine_.device);
  }
  bool fits(const Ledger& ledger) const { return !shortage_of(ledger).any(); }
  bool fits_device(const Ledger& ledger) const { return shortage_of(ledger).device == 0; }

  /// As many resident blocks as fit; −1: there is no number of them that does. What they need of the device
  /// grows with their number, and what the others need of the host shrinks.
  std::int64_t most_resident(const Choice& choice) {
    const auto fits_with = [&](std::int64_t blocks) { return fits(place(config_of(choice, blocks))); };
    if (given_.resident_blocks) return fits_with(*given_.resident_blocks) ? *given_.resident_blocks : -1;
    const std::int64_t all = given_.optimizer_update == OptimizerUpdate::immediate ? 0 : most_resident_;
    std::int64_t fitting = -1;
    std::int64_t too_many = all + 1;
    while (too_many - fitting > 1) {
      const std::int64_t middle = fitting + (too_many - fitting) / 2;
      (fits_device(place(config_of(choice, middle))) ? fitting : too_many) = middle;
    }
    // A simulated device takes its memory from the host.
    while (fitting >= 0 && !fits_with(fitting)) {
      fitting = machine_.device.uses_host_memory() ? fitting - 1 : -1;
    }
    return fitting;
  }

  /// Of a step; infinite if it does not fit.
  double seconds(const Choice& choice) {
    const auto known = seconds_.find(choice);
    if (known != seconds_.end()) return known->second;
    double& result = seconds_[choice];
    result = std::numeric_limits<double>::infinity();
    const std::int64_t resident = most_resident(choice);
    if (resident < 0) return result;
    place(config_of(choice, resident));
    const StepPrediction prediction = predict();
    num_operations_ += prediction.schedule.operations.size();
    ++num_simulated_;
    return result = prediction.run.seconds;
  }

  /// Of the placement that the shape has.
  StepPrediction predict() const {
    return predict_step(machine_.profile, shape_, chunks_, planned_block_costs(shape_, *backend_));
  }

  std::vector<Choice> neighbours(const Choice& from) {
    std::vector<Choice> all;
    const auto add = [&](const std::function<void(Choice&)>& change) {
      Choice changed = from;
      change(changed);
      changed = obeying(changed);
      if (changed != from) all.push_back(changed);
    };
    // What is kept, with the same homes and with those that leave the host the most room.
    const auto add_kept = [&](const std::function<void(Choice&)>& change) {
      add(change);
      add([&](Choice& c) {
        change(c);
        c = with_most_activations_on_device(c);
      });
    };
    for (const int step : {1, -1, 4, -4, 16, -16}) {
      add_kept([&](Choice& c) {
        c.activation_blocks = std::clamp<std::int64_t>(c.activation_blocks + step, 0, num_layers());
      });
      add_kept([&](Choice& c) {
        c.activation_chunks = std::clamp<std::int64_t>(c.activation_chunks + step, 1, chunks_of_row_);
      });
      add([&](Choice& c) {
        c.device_activation_blocks =
            std::clamp<std::int64_t>(c.device_activation_blocks + step, 0, num_layers());
      });
    }
    for (const int step : {5, -5, 20, -20}) {
      add([&](Choice& c) { c.share_percent = std::clamp(c.share_percent + step, 0, 100); });
    }
    for (const auto policy : {ActivationPolicy::input_attention, ActivationPolicy::all}) {
      add([&](Choice& c) { c.activation_policy = policy; });
      add([&](Choice& c) { c = with_most_chunks(c, policy); });
      add([&](Choice& c) {
        c.activation_policy = policy;
        c.activation_blocks = num_layers();
      });
    }
    for (const std::int64_t slots : {1, 2, 3}) add([&](Choice& c) { c.weight_slots = slots; });
    add([](Choice& c) { c.gradients_on_host = !c.gradients_on_host; });
    if (may_update_in_place()) add([](Choice& c) { c.updates_in_place = !c.updates_in_place; });
    add([](Choice& c) {
      c.loop_order =
          c.loop_order == LoopOrder::layer_major ? LoopOrder::micro_batch_major : LoopOrder::layer_major;
    });
    return all;
  }

  std::pair<double, Choice> descend(std::pair<double, Choice> at) {
    constexpr double least_gain = 1e-3;  // below it a placement is as good as another
    while (num_operations_ < most_operations) {
      std::pair<double, Choice> next = at;
      for (const Choice& neighbour : neighbours(at.second)) {
        next = std::min(next, {seconds(neighbour), neighbour});
      }
      if (next.first > (1.0 - least_gain) * at.first) break;
      at = next;
    }
    return at;
  }

  Plan plan_of(const Choice& choice) {
    Plan plan;
    plan.config = config_of(choice, most_resident(choice));
    plan.memory.ledger = place(plan.config);
    plan.memory.shape = shape_;
    plan.chunks = chunks_;
    plan.prediction = predict();
    plan.bottleneck = find_bottleneck(plan.prediction);
    plan.num_candidates = num_simulated_;
    return plan;
  }

  /// Nothing fits: says what is missing where least is, of one memory if that can be, and what narrows the
  /// choice.
  [[noreturn]] void refuse() {
    const auto missing = [&](const Ledger& ledger) {
      const Shortage short_of = shortage_of(ledger);
      return std::pair(short_of.device > 0 && short_of.host > 0, short_of.device + short_of.host);
    };
    std::optional<Ledger> nearest;
    for (const Choice& choice : smallest()) {
      Ledger ledger = place(config_of(choice, given_.resident_blocks.value_or(0)));
      if (!nearest || missing(ledger) < missing(*nearest)) nearest = std::move(ledger);
    }
    std::string more;
    if (shortage_of(*nearest).host > 0 && given_.optimizer_update == OptimizerUpdate::deferred) {
      more =
          "\n  optimizer_update: immediate keeps no gradients of a whole step; it needs max_grad_norm: 0, and "
          "neither optimizer_device_share nor resident_blocks";
    }
    std::string given;
    for (const ConfigField& field : placement_fields()) {
      const std::string value = field.show(given_);
      if (value != "null") given += fmt::format("{}{}: {}", given.empty() ? "" : ", ", field.key, value);
    }
    try {
      check_memory(*nearest, machine_.host, machine_.device);
    } catch (const ResourceError& error) {
      if (!given.empty()) {
        more +=
            fmt::format("\n  the configuration fixes {}; what is left out is the planner's choice", given);
      }
      throw ResourceError(error.what() + more);
    }
    throw ResourceError(fmt::format("no placement fits that has {}; leave out what need not be", given));
  }

  /// Bounds the search where a step has very many operations: a second or two of simulation.
  static constexpr std::size_t most_operations = 2'000'000;

  const RunConfig& given_;
  const Machine& machine_;
  std::unique_ptr<MemoryBackend> backend_;
  EngineShape shape_;  ///< its schedule: the placement looked at last
  Ledger process_;
  ChunkPlan chunks_;
  std::int64_t most_resident_ = 0;  ///< that can be at all
  std::int64_t chunks_of_row_ = 1;  ///< at most
  std::vector<Choice> smallest_;
  std::map<Choice, std::int64_t> most_on_device_;  ///< by choices that have none there
  std::map<Choice, double> seconds_;
  std::size_t num_operations_ = 0;
  int num_simulated_ = 0;
};

}  // namespace

namespace {

/// The configuration with each chunk length that may be used, the preferred one first.
std::vector<RunConfig> with_chunks(const RunConfig& config) {
  if (config.chunk_tokens) return {config};
  constexpr std::int64_t shortest = 1024;  // below it scratch is small beside all else, and products are slow
  std::vector<RunConfig> all;
  for (std::int64_t tokens = default_chunk_tokens; tokens >= shortest; tokens /= 2) {
    all.push_back(config);
    all.back().chunk_tokens = tokens;
  }
  return all;
}

}  // namespace

Plan plan_placement(const ModelSpec& spec, const RunConfig& config, const Machine& machine,
                    std::size_t data_bytes) {
  const std::vector<RunConfig> choices = with_chunks(config);
  for (const RunConfig& choice : choices) {
    Search search(spec, choice, machine, data_bytes);
    if (search.any_fits()) return search.best();
  }
  try {
    return Search(spec, choices.front(), machine, data_bytes).best();
  } catch (const ResourceError& error) {
    // Rows alone may be too long, or too many of them.
    const std::int64_t longest = longest_row_tokens(spec, config, machine, data_bytes);
    if (longest == 0) throw;
    throw ResourceError(fmt::format("{}\n  one row a step of up to {} tokens would fit (cutoff_len is {})",
                                    error.what(), longest, config.cutoff_len));
  }
}

bool can_be_placed(const ModelSpec& spec, const RunConfig& config, const Machine& machine,
                   std::size_t data_bytes) {
  return std::ranges::any_of(with_chunks(config), [&](const RunConfig& choice) {
    return Search(spec, choice, machine, data_bytes).any_fits();
  });
}

std::optional<HardwareProfile> profile_of_run(const RunConfig& config, const Device& device) {
  if (!config.hardware_profile.empty()) return find_hardware_profile(config.hardware_profile);
  if (device.uses_host_memory()) return {};
  // What the machine has says which it is, not what this run may use of it.
  RunConfig unlimited = config;
  unlimited.host_memory_limit.reset();
  return shipped_profile_for(device.description(), static_cast<double>(device.total_memory()),
                             static_cast<double>(host_budget(unlimited).bytes));
}

std::string Plan::placement_yaml() const {
  std::string text;
  for (const ConfigField& field : placement_fields())
    text += fmt::format("{}: {}\n", field.key, field.show(config));
  return text;
}

std::string Plan::summary() const {
  const StepReport& report = prediction.report;
  const auto use = [&](MachineResource resource) { return 100.0 * prediction.run.use_of(resource); };
  return fmt::format(
      "predicted: {:.4g} s a step, {:.0f} tokens/s, {:.0f} model TFLOP/s\n"
      "predicted use: device {:.0f}%, its memory {:.0f}%, link in {:.0f}%, out {:.0f}%, host memory {:.0f}%\n"
      "bottleneck: {}; {} would help\n",
      prediction.run.seconds, tokens_per_second(), 1e-12 * report.model_flops / prediction.run.seconds,
      use(MachineResource::compute), use(MachineResource::device_memory), use(MachineResource::link_in),
      use(MachineResource::link_out), use(MachineResource::host_memory), bottleneck.what, bottleneck.relief);
}

}  // namespace layerstream
