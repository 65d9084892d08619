// Documents that share a row never see each other.

#include <gtest/gtest.h>

#include <cmath>

#include "trained_model.hpp"

namespace layerstream::test {
namespace {

/// Two documents in one row.
struct PackedPair {
  TokenRow a, b;
  TokenRow packed() const {
    TokenRow row = a;
    row.input_ids.insert(row.input_ids.end(), b.input_ids.begin(), b.input_ids.end());
    row.targets.insert(row.targets.end(), b.targets.begin(), b.targets.end());
    row.document_starts.push_back(a.num_tokens());
    return row;
  }
};

TokenRow document(std::int64_t tokens, std::int64_t vocab_size, std::uint64_t seed) {
  TokenRow row;
  row.document_starts = {0};
  for (std::int64_t t = 0; t < tokens; ++t) {
    row.input_ids.push_back(static_cast<std::int32_t>(uniform_at(seed, 1, static_cast<std::uint64_t>(t)) *
                                                      static_cast<double>(vocab_size)));
  }
  for (std::int64_t t = 0; t < tokens; ++t) {
    row.targets.push_back(t + 1 < tokens ? row.input_ids[static_cast<std::size_t>(t + 1)] : -100);
  }
  return row;
}

struct Chunking {
  DType compute;
  std::int64_t chunk_tokens;  ///< rows here have 21 tokens, the first document 9 of them
};

void PrintTo(const Chunking& chunking, std::ostream* stream) {
  *stream << name_of(chunking.compute) << " " << chunking.chunk_tokens;
}

class Packed : public ::testing::TestWithParam<Chunking> {
 protected:
  Packed() {
    run_.compute_dtype = GetParam().compute;
    run_.chunk_tokens = GetParam().chunk_tokens;
  }
  static ModelSpec small_vocabulary() {
    ModelSpec spec = tiny_spec(false);
    spec.vocab_size = 13;
    return spec;
  }
  ModelSpec spec_ = small_vocabulary();
  RunConfig run_ = tiny_run();
  PackedPair pair_{document(9, spec_.vocab_size, 1), document(12, spec_.vocab_size, 2)};
};

INSTANTIATE_TEST_SUITE_P(Chunkings, Packed,
                         ::testing::Values(Chunking{DType::f32, 64}, Chunking{DType::f32, 9},
                                           Chunking{DType::f32, 5}, Chunking{DType::bf16, 64},
                                           Chunking{DType::bf16, 9}, Chunking{DType::bf16, 5}),
                         [](const auto& info) {
                           return std::string(name_of(info.param.compute)) + "_chunks_of_" +
                                  std::to_string(info.param.chunk_tokens);
                         });

TEST_P(Packed, EditingADocumentLeavesEveryLogitOfTheNextOneAsItIs) {
  TrainedModel model(spec_, run_);
  PackedPair edited = pair_;
  edited.a = document(9, spec_.vocab_size, 77);
  TokenRow row = pair_.packed();
  TokenRow other = edited.packed();
  ASSERT_NE(row.input_ids, other.input_ids);
  // −log p of each token of the vocabulary at a position tells its logits up to a constant, which p's sum
  // of 1 fixes.
  for (const std::size_t position : {std::size_t{9}, std::size_t{13}, std::size_t{20}}) {
    std::fill(row.targets.begin(), row.targets.end(), -100);
    std::fill(other.targets.begin(), other.targets.end(), -100);
    double probability = 0.0;
    for (std::int32_t token = 0; token < spec_.vocab_size; ++token) {
      row.targets[position] = token;
      other.targets[position] = token;
      const double nll = model.engine.evaluate({&row, 1});
      ASSERT_EQ(nll, model.engine.evaluate({&other, 1})) << "position " << position << ", token " << token;
      probability += std::exp(-nll);
    }
    EXPECT_NEAR(probability, 1.0, 1e-5);  // fp32 softmax
  }
  // The test can fail: the edit does reach the logits of the document itself.
  std::fill(row.targets.begin(), row.targets.end(), -100);
  std::fill(other.targets.begin(), other.targets.end(), -100);
  row.targets[8] = other.targets[8] = 3;
  EXPECT_NE(model.engine.evaluate({&row, 1}), model.engine.evaluate({&other, 1}));
}

TEST_P(Packed, EditingADocumentLeavesTheGradientsOfTheNextOneAsTheyAre) {
  PackedPair edited = pair_;
  edited.a = document(9, spec_.vocab_size, 77);
  TokenRow row = pair_.packed();
  TokenRow other = edited.packed();
  for (std::size_t t = 0; t < 9; ++t) row.targets[t] = other.targets[t] = -100;
  TrainedModel first(spec_, run_);
  TrainedModel second(spec_, run_);
  const StepResult a = first.engine.train_step({&row, 1}, step_settings(run_, 1));
  const StepResult b = second.engine.train_step({&other, 1}, step_settings(run_, 1));
  EXPECT_EQ(a.loss, b.loss);
  EXPECT_EQ(a.grad_norm, b.grad_norm);
  EXPECT_TRUE(first.gradients() == second.gradients());
}

TEST_P(Packed, LossOfThePackedRowIsTheSumOfTheSeparateLosses) {
  TrainedModel model(spec_, run_);
  const TokenRow row = pair_.packed();
  const double packed = model.engine.evaluate({&row, 1});
  const double separate = model.engine.evaluate({&pair_.a, 1}) + model.engine.evaluate({&pair_.b, 1});
  EXPECT_NEAR(packed / separate, 1.0, 1e-6);
}

}  // namespace
}  // namespace layerstream::test
