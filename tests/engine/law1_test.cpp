// Law 1: placement never changes the result. One run is the reference; every knob is turned, and losses,
// norms, weights and moments must be equal bit for bit.

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <thread>

#include "engine_fixture.hpp"

namespace layerstream::test {
namespace {

/// The first has no update that waits, the second's finds no moments; from the third on all are alike.
constexpr int num_steps = 3;

struct Knob {
  std::string name;
  std::function<void(RunConfig&)> turn;
};

void PrintTo(const Knob& knob, std::ostream* stream) {
  *stream << knob.name;
}

std::vector<Knob> knobs() {
  std::vector<Knob> all{
      {"same_again", [](RunConfig&) {}},
      {"coherent_backend",
       [](RunConfig& run) {
         run.backend = BackendChoice::coherent;
         run.allow_emulation = true;
       }},
      {"all_updates_by_the_host", [](RunConfig& run) { run.optimizer_device_share = 0.0; }},
      {"two_optimizer_threads", [](RunConfig& run) { run.optimizer_threads = 2; }},
      {"accumulate_2x4",
       [](RunConfig& run) {
         run.per_device_train_batch_size = 2;
         run.gradient_accumulation_steps = 4;
       }},
      {"accumulate_1x8",
       [](RunConfig& run) {
         run.per_device_train_batch_size = 1;
         run.gradient_accumulation_steps = 8;
       }},
  };
  for (const int slots : {1, 3, 6}) {
    all.push_back(
        {"weight_slots_" + std::to_string(slots), [slots](RunConfig& run) { run.weight_slots = slots; }});
  }
  const std::map<std::string, ActivationPolicy> policies{{"input", ActivationPolicy::input},
                                                         {"attention", ActivationPolicy::input_attention},
                                                         {"all", ActivationPolicy::all}};
  for (const auto& [name, policy] : policies) {
    for (const bool on_host : {true, false}) {
      for (const bool coherent : {false, true}) {
        all.push_back(
            {"save_" + name + (on_host ? "_on_host" : "_on_device") + (coherent ? "_coherent" : "_explicit"),
             [policy = policy, on_host, coherent](RunConfig& run) {
               run.activation_policy = policy;
               run.device_activation_blocks = on_host ? 0 : 4;
               run.backend = coherent ? BackendChoice::coherent : BackendChoice::explicit_copies;
               run.allow_emulation = coherent;
               run.weight_slots = coherent ? 3 : 1;
             }});
      }
    }
  }
  // Shares come in units of 4096 elements: of these blocks of 1952 to 9408 nothing, one unit, two units and
  // all in three pieces, with the last matrix and the vectors in the last piece.
  for (const double share : {0.3, 0.5, 0.9, 1.0}) {
    for (const bool on_host : {true, false}) {
      for (const int slots : {1, 3}) {
        all.push_back({fmt::format("device_updates_{:.0f}_percent_gradients_on_{}_weight_slots_{}",
                                   100.0 * share, on_host ? "host" : "device", slots),
                       [share, on_host, slots](RunConfig& run) {
                         run.optimizer_device_share = share;
                         run.gradients_on_host = on_host;
                         run.weight_slots = slots;
                         run.optimizer_threads = slots;
                       }});
      }
    }
  }
  for (const std::int64_t saving : {0, 1, 3}) {  // of 4 decoder blocks
    for (const bool on_host : {true, false}) {
      all.push_back({fmt::format("save_all_of_{}_blocks_on_{}", saving, on_host ? "host" : "device"),
                     [saving, on_host](RunConfig& run) {
                       run.activation_policy = ActivationPolicy::all;
                       run.activation_blocks = saving;
                       run.device_activation_blocks = on_host ? 0 : 4;
                     }});
    }
  }
  // Some blocks' activations on the device and the others' on the host, and of long rows the last chunks.
  for (const auto& [name, policy] : policies) {
    if (policy == ActivationPolicy::input) continue;
    for (const std::int64_t on_device : {1, 2}) {
      for (const std::int64_t chunks : {1, 3}) {
        all.push_back({fmt::format("save_{}_of_{}_chunks_{}_blocks_on_device", name, chunks, on_device),
                       [policy = policy, on_device, chunks](RunConfig& run) {
                         run.activation_policy = policy;
                         run.activation_blocks = 3;
                         run.activation_chunks = chunks;
                         run.device_activation_blocks = on_device;
                         run.loop_order =
                             on_device == 1 ? LoopOrder::micro_batch_major : LoopOrder::layer_major;
                       }});
      }
    }
  }
  for (const int resident : {0, 1, 5, 6}) {  // of 6
    for (const bool on_host : {true, false}) {
      all.push_back({fmt::format("micro_batch_major_resident_blocks_{}_activations_on_{}", resident,
                                 on_host ? "host" : "device"),
                     [resident, on_host](RunConfig& run) {
                       run.loop_order = LoopOrder::micro_batch_major;
                       run.resident_blocks = resident;
                       run.activation_policy = ActivationPolicy::all;
                       run.activation_blocks = 2;
                       run.device_activation_blocks = on_host ? 0 : 4;
                       run.optimizer_device_share = on_host ? 0.5 : 0.0;
                       run.gradients_on_host = resident == 1;
                       run.weight_slots = on_host ? 1 : 3;
                     }});
    }
  }
  all.push_back({"micro_batch_major_coherent_backend", [](RunConfig& run) {
                   run.loop_order = LoopOrder::micro_batch_major;
                   run.backend = BackendChoice::coherent;
                   run.allow_emulation = true;
                   run.resident_blocks = 2;
                 }});
  for (const int resident : {1, 3, 6}) {  // of 6
    for (const bool alone : {true, false}) {
      all.push_back({fmt::format("resident_blocks_{}_{}", resident,
                                 alone ? "others_by_the_host" : "others_by_both_one_weight_slot"),
                     [resident, alone](RunConfig& run) {
                       run.resident_blocks = resident;
                       run.optimizer_device_share = alone ? 0.0 : 0.5;
                       run.gradients_on_host = alone;
                       run.weight_slots = alone ? 3 : 1;
                     }});
    }
  }
  all.push_back({"coherent_backend_resident_blocks", [](RunConfig& run) {
                   run.backend = BackendChoice::coherent;
                   run.allow_emulation = true;
                   run.resident_blocks = 2;
                   run.optimizer_device_share = 0.5;
                 }});
  all.push_back({"coherent_backend_device_updates", [](RunConfig& run) {
                   run.backend = BackendChoice::coherent;
                   run.allow_emulation = true;
                   run.optimizer_device_share = 1.0;
                   run.gradients_on_host = false;
                 }});
  for (const double share : {0.5, 1.0}) {
    for (const bool on_host : {true, false}) {
      for (const bool by_kernel : {true, false}) {
        all.push_back(
            {fmt::format("device_updates_{:.0f}_percent_in_place_gradients_on_{}_promotion_by_{}",
                         100.0 * share, on_host ? "host" : "device", by_kernel ? "kernel" : "copy_engine"),
             [share, on_host, by_kernel](RunConfig& run) {
               run.backend = BackendChoice::coherent;
               run.allow_emulation = true;
               run.optimizer_device_share = share;
               run.gradients_on_host = on_host;
               run.updates_in_place = true;
               run.device_update_blocks = on_host ? 1 : 16;
               run.promotes_by_kernel = by_kernel;
               run.resident_blocks = by_kernel ? 1 : 0;
               run.weight_slots = by_kernel ? 1 : 3;
             }});
      }
    }
  }
  return all;
}

TEST(Law1Knobs, DeviceSharesArePartsOfBlocksInSeveralPieces) {
  const std::unique_ptr<Device> device = make_test_device(0);
  const auto pieces = [&](double share) {
    RunConfig run = tiny_run();
    run.optimizer_device_share = share;
    const EngineShape shape = make_engine_shape(tiny_spec(), run, EngineMode::train, *device);
    std::vector<int> all;
    for (const int block : {0, 1, shape.layout.head()})
      all.push_back(shape.schedule.device_update.num_pieces(block));
    return all;
  };
  EXPECT_EQ(pieces(0.3), (std::vector{0, 0, 0}));
  EXPECT_EQ(pieces(0.5), (std::vector{0, 1, 0}));
  EXPECT_EQ(pieces(0.9), (std::vector{0, 2, 0}));
  EXPECT_EQ(pieces(1.0), (std::vector{1, 3, 1}));
}

/// Else the base without tied embeddings would say nothing of that way.
TEST(Law1Knobs, SomeEmitOnlyTheUsedRowsOfTheEmbedding) {
  const std::unique_ptr<Device> device = make_test_device(std::size_t{1} << 30);
  int emitting = 0;
  for (const Knob& knob : knobs()) {
    RunConfig run = tiny_run();
    knob.turn(run);
    const Engine engine(tiny_spec(false), run, EngineMode::train, *device, {.rehearse = false});
    if (engine.shape().schedule.emits_embedding_rows()) ++emitting;
  }
  EXPECT_GE(emitting, 5);
}

/// A way to train: what all knobs of a test share.
struct Base {
  std::string name;
  bool tied;
  DType compute;
  double max_grad_norm;
  std::int64_t chunk_tokens;  ///< 40: several rows in a chunk; 7: every row in several chunks
};

void PrintTo(const Base& base, std::ostream* stream) {
  *stream << base.name;
}

RunConfig run_of(const Base& base) {
  RunConfig run = tiny_run();
  run.compute_dtype = base.compute;
  run.max_grad_norm = base.max_grad_norm;
  run.chunk_tokens = base.chunk_tokens;
  return run;
}

class Law1 : public ::testing::TestWithParam<std::tuple<Base, Knob>> {};

TEST_P(Law1, TurningAKnobChangesNoBit) {
  const auto& [base, knob] = GetParam();
  const ModelSpec spec = tiny_spec(base.tied);
  static std::map<std::string, RunRecord> references;
  if (!references.contains(base.name)) references[base.name] = train(spec, run_of(base), num_steps);
  RunConfig run = run_of(base);
  knob.turn(run);
  const RunRecord record = train(spec, run, num_steps);
  const RunRecord& reference = references[base.name];
  EXPECT_EQ(record.losses, reference.losses);
  EXPECT_EQ(record.norms, reference.norms);
  EXPECT_TRUE(record.slabs == reference.slabs);
  // The runs did train: the loss moved and nothing is NaN.
  EXPECT_LT(record.losses.back(), record.losses.front());
}

INSTANTIATE_TEST_SUITE_P(
    Everywhere, Law1,
    ::testing::Combine(::testing::Values(Base{"tied_fp32", true, DType::f32, 1.0, 40},
                                         Base{"untied_bf16_long_rows", false, DType::bf16, 1.0, 7},
                                         Base{"tied_bf16_unclipped", true, DType::bf16, 0.0, 24}),
                       ::testing::ValuesIn(knobs())),
    [](const auto& info) { return std::get<0>(info.param).name + "__" + std::get<1>(info.param).name; });

class ImmediateUpdate : public ::testing::TestWithParam<std::tuple<bool, int>> {};

TEST_P(ImmediateUpdate, EqualsDeferredUpdateWithoutClipping) {
  const auto [tied, slots] = GetParam();
  const ModelSpec spec = tiny_spec(tied);
  RunConfig run = tiny_run();
  run.max_grad_norm = 0.0;
  run.weight_slots = slots;
  const RunRecord deferred = train(spec, run, num_steps);
  run.optimizer_update = OptimizerUpdate::immediate;
  EXPECT_TRUE(train(spec, run, num_steps) == deferred);
}

INSTANTIATE_TEST_SUITE_P(Everywhere, ImmediateUpdate,
                         ::testing::Combine(::testing::Bool(), ::testing::Values(1, 2, 4)));

/// Makes lanes slower than each other in ways that change from operation to operation.
class RandomDelays final : public ExecutionObserver {
 public:
  explicit RandomDelays(std::uint64_t seed) : seed_(seed) {}
  void before(int index, const Operation& operation) override {
    const double draw =
        uniform_at(seed_, static_cast<std::uint64_t>(operation.lane), static_cast<std::uint64_t>(index));
    // Up to 0.3 ms: several times what an operation of these models takes.
    if (draw < 0.1) std::this_thread::sleep_for(std::chrono::microseconds(static_cast<int>(draw * 3000)));
  }
  void after(int index, const Operation& operation) override { before(index + 100'000, operation); }

 private:
  std::uint64_t seed_;
};

class Asynchrony : public ::testing::TestWithParam<Knob> {};

/// Every buffer that must be written before it is read holds NaN, slots turn to NaN when they are released,
/// and lanes run at random speeds: whoever reads too early or too late shows.
TEST_P(Asynchrony, PoisonedBuffersAndRandomDelaysChangeNoBit) {
  const ModelSpec spec = tiny_spec(true);
  static std::map<std::int64_t, RunRecord> calm;  // before a knob is turned, which changes no bit
  for (const std::int64_t chunk_tokens : {40, 7}) {
    RunConfig run = tiny_run();
    run.chunk_tokens = chunk_tokens;
    if (!calm.contains(chunk_tokens)) calm[chunk_tokens] = train(spec, run, num_steps);
    GetParam().turn(run);
    RandomDelays delays(static_cast<std::uint64_t>(chunk_tokens));
    EXPECT_TRUE(train(spec, run, num_steps, {.poison = true, .observer = &delays}) == calm[chunk_tokens])
        << chunk_tokens << " tokens a chunk";
  }
}

INSTANTIATE_TEST_SUITE_P(Everywhere, Asynchrony, ::testing::ValuesIn(knobs()),
                         [](const auto& info) { return info.param.name; });

/// The rehearsal chooses algorithms; it must not choose bits. Without effect in a CPU build.
TEST(Law1Rehearsal, ChangesNoBit) {
  for (const DType compute : {DType::f32, DType::bf16}) {
    for (const std::int64_t chunk_tokens : {40, 7}) {
      RunConfig run = tiny_run();
      run.compute_dtype = compute;
      run.chunk_tokens = chunk_tokens;
      EXPECT_TRUE(train(tiny_spec(), run, num_steps) ==
                  train(tiny_spec(), run, num_steps, {.rehearse = false}));
    }
  }
}

TEST(Law1Evaluation, LossOfAForwardPassEqualsTheTrainingLoss) {
  const ModelSpec spec = tiny_spec(true);
  for (const ActivationPolicy policy :
       {ActivationPolicy::input, ActivationPolicy::input_attention, ActivationPolicy::all}) {
    for (const bool on_host : {true, false}) {
      RunConfig run = tiny_run();
      run.activation_policy = policy;
      run.device_activation_blocks = on_host ? 0 : 4;
      const std::unique_ptr<Device> device = make_test_device(std::size_t{1} << 30);
      Engine engine(spec, run, EngineMode::train, *device, {.poison = true});
      engine.parameters().initialize(11, spec.initializer_range, engine.pool());
      const auto rows = random_rows(8, run.cutoff_len, spec.vocab_size, 1);
      const double nll = engine.evaluate(rows);
      const StepResult step = engine.train_step(rows, step_settings(run, 1));
      EXPECT_EQ(nll / static_cast<double>(step.num_targets), step.loss);
    }
  }
}

}  // namespace
}  // namespace layerstream::test
