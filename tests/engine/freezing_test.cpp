// Parameters that are not trained: they stay as they are, the others move as they would, and blocks of
// nothing else take neither memory nor time for gradients and moments.

#include <gmock/gmock.h>

#include <cmath>

#include "core/name_pattern.hpp"
#include "engine/checkpoint_io.hpp"
#include "engine/memory_plan.hpp"
#include "engine/step_report.hpp"
#include "run_fixture.hpp"
#include "tests/backends/forwarding_device.hpp"

namespace layerstream::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

using Patterns = std::vector<std::string>;

struct Frozen {
  std::string name;
  Patterns patterns;
};
void PrintTo(const Frozen& frozen, std::ostream* stream) {
  *stream << frozen.name;
}

/// Of four decoder blocks.
const std::vector<Frozen> frozen_sets{
    {"first_blocks", {"model.embed_tokens.*", "model.layers.[01].*"}},
    {"blocks_between", {"model.layers.1.*", "model.layers.2.*"}},
    {"all_but_one_block", {"model.embed_tokens.*", "model.layers.[013].*", "model.norm.*", "lm_head*"}},
    {"head", {"model.norm.weight", "lm_head*"}},
    {"embedding", {"model.embed_tokens.weight"}},
    {"all_but_the_head", {"model.embed_tokens.*", "model.layers.*"}},
    {"parts_of_blocks", {"*.q_proj.*", "*norm*", "model.layers.3.mlp.down_proj.weight"}},
};

/// Of a model whose head is tied there is no lm_head.
RunConfig with_frozen(RunConfig run, const Patterns& patterns, bool tied) {
  for (const std::string& pattern : patterns) {
    if (!tied || pattern != "lm_head*") run.frozen_parameters.push_back(pattern);
  }
  return run;
}

struct Placement {
  std::string name;
  std::function<void(RunConfig&)> turn;
};

std::vector<Placement> placements() {
  return {
      {"one slot", [](RunConfig& run) { run.weight_slots = 1; }},
      {"coherent",
       [](RunConfig& run) {
         run.backend = BackendChoice::coherent;
         run.allow_emulation = true;
       }},
      {"save all on the host",
       [](RunConfig& run) {
         run.activation_policy = ActivationPolicy::all;
         run.weight_slots = 3;
       }},
      {"save all, two blocks on the device",
       [](RunConfig& run) {
         run.activation_policy = ActivationPolicy::all;
         run.activation_blocks = 3;
         run.device_activation_blocks = 2;
       }},
      {"save attention on the device",
       [](RunConfig& run) {
         run.activation_policy = ActivationPolicy::input_attention;
         run.device_activation_blocks = 4;
       }},
      {"device updates half",
       [](RunConfig& run) {
         run.optimizer_device_share = 0.5;
         run.gradients_on_host = false;
       }},
      {"device updates all", [](RunConfig& run) { run.optimizer_device_share = 1.0; }},
      {"micro-batch-major",
       [](RunConfig& run) {
         run.loop_order = LoopOrder::micro_batch_major;
         run.activation_policy = ActivationPolicy::all;
         run.activation_blocks = 2;
         run.optimizer_device_share = 0.5;
       }},
      {"immediate",
       [](RunConfig& run) {
         run.optimizer_update = OptimizerUpdate::immediate;
         run.max_grad_norm = 0.0;
       }},
      {"two threads", [](RunConfig& run) { run.optimizer_threads = 2; }},
  };
}

class Freezing : public ::testing::TestWithParam<std::tuple<Frozen, bool>> {
 protected:
  bool tied() const { return std::get<1>(GetParam()); }
  const Patterns& patterns() const { return std::get<0>(GetParam()).patterns; }
  RunConfig frozen_run() const {
    RunConfig run = with_frozen(tiny_run(), patterns(), tied());
    run.max_grad_norm = 0.0;
    return run;
  }
  ModelSpec spec() const { return tiny_spec(tied()); }
};

INSTANTIATE_TEST_SUITE_P(All, Freezing,
                         ::testing::Combine(::testing::ValuesIn(frozen_sets), ::testing::Bool()),
                         [](const auto& info) {
                           return std::get<0>(info.param).name +
                                  (std::get<1>(info.param) ? "_tied" : "_untied");
                         });

/// What a step made of a parameter; moments and gradient are empty where there are none.
struct Trained {
  std::vector<float> weights, moments, gradient;
};
using Parameters = std::map<std::string, Trained>;

template <class F>
void for_each_parameter(const ModelLayout& layout, const F& f) {
  for (int block = 0; block < layout.num_blocks(); ++block) {
    for (const Parameter& parameter : layout.blocks[static_cast<std::size_t>(block)].parameters)
      f(block, parameter);
  }
}

/// Weights and moments.
void read_state(const ParameterStore& store, Parameters& parameters) {
  for_each_parameter(store.layout(), [&](int block, const Parameter& parameter) {
    Trained& trained = parameters[parameter.name];
    trained.weights.resize(static_cast<std::size_t>(parameter.numel()));
    store.read(block, parameter, 0, trained.weights);
    if (const float* const moments = store.slab(block).exp_avg; moments != nullptr) {
      trained.moments.assign(moments + parameter.offset, moments + parameter.offset + parameter.numel());
    }
  });
}

struct Step {
  StepResult result;
  Parameters before, after;
};

Step one_step(const ModelSpec& spec, const RunConfig& run) {
  const std::unique_ptr<Device> device = make_test_device(std::size_t{1} << 30);
  Engine engine(spec, run, EngineMode::train, *device, {.poison = true});
  engine.parameters().initialize(11, spec.initializer_range, engine.pool());
  Step step;
  read_state(engine.parameters(), step.before);
  step.result = engine.train_step(random_rows(8, run.cutoff_len, spec.vocab_size, 1), step_settings(run, 1));
  const ModelLayout& layout = engine.shape().layout;
  for_each_parameter(layout, [&](int block, const Parameter& parameter) {
    if (!layout.is_frozen(block)) step.after[parameter.name].gradient = engine.gradient(block, parameter);
  });
  engine.apply_pending();
  read_state(engine.parameters(), step.after);
  return step;
}

TEST_P(Freezing, WhatIsFrozenStaysAndTheRestMovesAsItWould) {
  RunConfig free = frozen_run();
  free.frozen_parameters.clear();
  const Step expected = one_step(spec(), free);
  const RunConfig run = frozen_run();
  const Step step = one_step(spec(), run);
  EXPECT_EQ(step.result.loss, expected.result.loss);
  double squares = 0.0;
  int frozen = 0;
  for (const auto& [name, values] : step.after) {
    const bool is_frozen = std::ranges::any_of(
        run.frozen_parameters, [&](const std::string& pattern) { return fits_pattern(name, pattern); });
    frozen += is_frozen ? 1 : 0;
    EXPECT_EQ(values.weights, is_frozen ? step.before.at(name).weights : expected.after.at(name).weights)
        << name;
    if (is_frozen) {
      for (const float moment : values.moments) ASSERT_EQ(moment, 0.0F) << name;
      continue;
    }
    EXPECT_EQ(values.moments, expected.after.at(name).moments) << name;
    EXPECT_NE(values.weights, step.before.at(name).weights) << name;
    for (const float g : expected.after.at(name).gradient) squares += static_cast<double>(g) * g;
  }
  EXPECT_GT(frozen, 0);
  // The norm is that of what is trained, as torch's over parameters that require a gradient. Sums in fp64 of
  // another order.
  EXPECT_NEAR(step.result.grad_norm, std::sqrt(squares), 1e-6 * step.result.grad_norm);
}

TEST_P(Freezing, PlacementNeverChangesABit) {
  RunConfig run = frozen_run();
  const RunRecord expected = train(spec(), run, 3);
  for (const Placement& placement : placements()) {
    RunConfig turned = run;
    placement.turn(turned);
    RunRecord record = train(spec(), turned, 3, {.poison = true});
    EXPECT_TRUE(record == expected) << placement.name;
  }
  RunConfig resident = run;
  resident.resident_blocks = most_resident_blocks(make_layout(spec(), run.frozen_parameters));
  EXPECT_TRUE(train(spec(), resident, 3, {.poison = true}) == expected)
      << *resident.resident_blocks << " resident";
}

TEST_P(Freezing, FrozenBlocksTakeNeitherMomentsNorGradientsNorTime) {
  const std::unique_ptr<Device> device = make_test_device(std::size_t{1} << 30);
  RunConfig run = frozen_run();
  RunConfig free = run;
  free.frozen_parameters.clear();
  const RunPlan frozen_plan = plan_run(spec(), run, *device, 0);
  const RunPlan free_plan = plan_run(spec(), free, *device, 0);
  const ModelLayout& layout = frozen_plan.shape.layout;
  std::int64_t elements = 0;
  for (int block = 0; block < layout.num_blocks(); ++block) {
    if (layout.is_frozen(block)) elements += layout.blocks[static_cast<std::size_t>(block)].num_elements;
  }
  const auto bytes = [](const RunPlan& plan, std::string_view component) {
    std::int64_t sum = 0;
    for (const LedgerLine& line : plan.ledger.lines()) {
      if (line.space == Space::host && line.component == component)
        sum += static_cast<std::int64_t>(line.bytes);
    }
    return sum;
  };
  const auto spared = [&](std::string_view component) {
    return bytes(free_plan, component) - bytes(frozen_plan, component);
  };
  // Slabs begin on multiples of the arena's alignment.
  const std::int64_t grain = 2 * layout.num_blocks() * static_cast<std::int64_t>(Arena::alignment);
  EXPECT_NEAR(static_cast<double>(spared("Adam moments (fp32)")), static_cast<double>(8 * elements),
              static_cast<double>(grain));
  EXPECT_NEAR(static_cast<double>(spared("gradients (fp32)")), static_cast<double>(4 * elements),
              static_cast<double>(grain));
  EXPECT_EQ(spared("weights, upper halves (bf16)"), 0);

  Engine engine(spec(), run, EngineMode::train, *device);
  engine.parameters().initialize(11, 0.2, engine.pool());
  engine.train_step(random_rows(8, run.cutoff_len, spec().vocab_size, 1), step_settings(run, 1));
  Engine free_engine(spec(), free, EngineMode::train, *device);
  free_engine.parameters().initialize(11, 0.2, free_engine.pool());
  free_engine.train_step(random_rows(8, run.cutoff_len, spec().vocab_size, 1), step_settings(run, 1));
  // Products of weight gradients: those of decoder blocks, and of the logits' matrix.
  bool spares_products = layout.is_frozen(tied() ? layout.embedding() : layout.head());
  for (int block = 1; block < layout.head(); ++block)
    spares_products = spares_products || layout.is_frozen(block);
  const double flops = model_flops(engine.schedule()), free_flops = model_flops(free_engine.schedule());
  if (spares_products) {
    EXPECT_LT(flops, free_flops);
  } else {
    EXPECT_EQ(flops, free_flops);
  }
  int first_trained = 0;
  while (layout.is_frozen(first_trained)) ++first_trained;
  for (const Operation& operation : engine.schedule().operations) {
    const bool is_gradients =
        operation.kind == OperationKind::clear_gradient || operation.kind == OperationKind::gradient_norm ||
        operation.kind == OperationKind::keep_gradient || operation.kind == OperationKind::update;
    if (operation.block >= 0 && layout.is_frozen(operation.block)) {
      EXPECT_FALSE(is_gradients) << name_of(operation.kind) << " of block " << operation.block;
    }
    if (operation.kind == OperationKind::backward || operation.kind == OperationKind::load_input ||
        operation.kind == OperationKind::save_input) {
      EXPECT_GE(operation.block, first_trained) << name_of(operation.kind);
    }
  }
}

class FrozenRun : public ::testing::Test {
 protected:
  RunConfig config(const Patterns& patterns, const std::string& output = "out") const {
    RunConfig run = files_.config(output);
    run.frozen_parameters = patterns;
    return run;
  }
  RunFiles files_;
};

TEST_F(FrozenRun, ResumesBitForBitFromASmallerCheckpoint) {
  const Patterns patterns{"model.embed_tokens.*", "model.layers.[01].*"};
  TestRun straight(config(patterns, "straight"));
  straight->run();
  EXPECT_THAT(straight.log(), HasSubstr("frozen: "));
  RunConfig run = config(patterns);
  {
    TestRun first(run);
    for (int i = 0; i < 5; ++i) first->step();
    std::uint64_t bytes = 0;
    for (const auto& entry : std::filesystem::directory_iterator(first->save())) bytes += entry.file_size();
    EXPECT_LE(bytes, checkpoint_bytes(first->engine().shape().layout));
    EXPECT_LT(bytes, static_cast<std::uint64_t>(first->engine().shape().layout.num_parameters()) * 9);
  }
  run.resume_from_checkpoint = "auto";
  TestRun resumed(run);
  resumed->run();
  EXPECT_EQ(resumed.slabs(), straight.slabs());

  // Moments that a frozen block has not got cannot be made up.
  run.frozen_parameters.clear();
  run.output_dir = files_.path("elsewhere").string();
  run.resume_from_checkpoint = (std::filesystem::path(files_.path("out")) / "checkpoint-5").string();
  EXPECT_THAT(message_of<ConfigError>([&] { TestRun{run}; }),
              AllOf(HasSubstr("frozen_parameters: model.embed_tokens.weight was frozen"),
                    HasSubstr("([model.embed_tokens.*, model.layers.[01].*])")));
}

void ask(const RunConfig& run, const std::vector<std::string>& assignments) {
  ReplanRequests(run.output_dir).submit(parse_replan_request("", "replan", assignments));
}

/// The first blocks, or a whole one between others and a part of each.
const std::vector<Patterns> replanned{{"model.embed_tokens.*", "model.layers.0.*"},
                                      {"model.layers.1.*", "*.k_proj.*"}};

TEST_F(FrozenRun, IsPlacedAnewWithoutChangingABit) {
  for (const Patterns& patterns : replanned) {
    const std::string name = patterns.front();
    const auto placed = [&](const std::string& output) {
      return with_default_placement(config(patterns, name + output), *make_test_device(0));
    };
    const RunConfig run = placed("moved");
    TestRun moved(run);
    const auto device_update = [&] { return moved->engine().shape().schedule.device_update; };
    const std::int64_t resident = most_resident_blocks(moved->engine().shape().layout);
    moved->step();
    moved->step();
    ask(run, {"optimizer_device_share=0.5", "gradient_home=device", "weight_slots=1", "activation_policy=all",
              fmt::format("resident_blocks={}", resident)});
    moved->replan_if_asked();
    ASSERT_THAT(moved.log(), HasSubstr("re-plan after step 2: placed anew")) << name;
    EXPECT_EQ(device_update().resident_blocks, resident) << name;
    moved->step();
    moved->step();
    // A frozen block has no state that could be at home anywhere.
    ask(run, {fmt::format("resident_blocks={}", resident + 1)});
    moved->replan_if_asked();
    EXPECT_THAT(moved.log(), AllOf(HasSubstr("re-plan after step 4 refused"), HasSubstr("is frozen")))
        << name;
    ask(run, {"resident_blocks=0", "optimizer_device_share=0", "gradient_home=host"});
    moved->replan_if_asked();
    ASSERT_THAT(moved.log(), HasSubstr("re-plan after step 4: placed anew")) << name;
    EXPECT_EQ(device_update().resident_blocks, 0) << name;
    EXPECT_FALSE(moved->run().interrupted);
    EXPECT_TRUE(outcome(moved, run) == train_to_the_end(placed("straight"))) << name;
  }
}

/// Whose memory another process may take.
class SharedDevice final : public ForwardingDevice {
 public:
  SharedDevice() : ForwardingDevice(make_test_device(std::size_t{1} << 30)) {}
  std::unique_ptr<DeviceRegion> allocate(std::size_t bytes) override {
    if (is_full) throw ResourceError("another process was faster");
    return ForwardingDevice::allocate(bytes);
  }
  bool is_full = false;
};

TEST_F(FrozenRun, WhatAFailedReplanLeavesIsACheckpointToResume) {
  for (const Patterns& patterns : replanned) {
    const std::string name = patterns.front();
    RunConfig run = config(patterns, name);
    {
      SharedDevice device;
      const StopRequest stop;
      std::ostringstream lines;
      Trainer trainer({.run = run, .origins = {}}, device, stop, Log(lines));
      for (int i = 0; i < 3; ++i) trainer.step();
      ask(run, {"activation_policy=all"});
      device.is_full = true;
      EXPECT_THAT(message_of<Error>([&] { trainer.replan_if_asked(); }),
                  AllOf(HasSubstr("no way back"), HasSubstr("checkpoint-3 is the newest checkpoint")));
    }
    run.resume_from_checkpoint = "auto";
    EXPECT_TRUE(train_to_the_end(run) == train_to_the_end(config(patterns, name + "straight"))) << name;
  }
}

TEST_F(FrozenRun, PatternsThatCannotBeMeantAreRefused) {
  EXPECT_THAT(message_of<ConfigError>([&] { TestRun{config({"model.layer.0.*"})}; }),
              AllOf(HasSubstr("frozen_parameters"), HasSubstr("model.layer.0.*"),
                    HasSubstr("model.embed_tokens.weight")));
  EXPECT_THAT(message_of<ConfigError>([&] { TestRun{config({"*"})}; }),
              HasSubstr("nothing is left to train"));
  RunConfig run = config({"model.layers.1.*"});
  run.resident_blocks = 3;
  EXPECT_THAT(
      message_of<ConfigError>([&] { TestRun{run}; }),
      AllOf(HasSubstr("resident_blocks"), HasSubstr("block 2 is frozen"), HasSubstr("lower it to 2")));
  run = config({});
  run.weight_decay_rules = {"*.nothing=0.5"};
  EXPECT_THAT(message_of<ConfigError>([&] { TestRun{run}; }),
              AllOf(HasSubstr("weight_decay_rules"), HasSubstr("*.nothing")));
}

}  // namespace
}  // namespace layerstream::test
