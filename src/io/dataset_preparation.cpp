#include "io/dataset_preparation.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <deque>
#include <system_error>

#include "core/child_process.hpp"
#include "core/error.hpp"

namespace layerstream::io {

namespace fs = std::filesystem;

namespace {

const std::vector<std::string>& files_of(const RunConfig& run, DataRole role) {
  return role == DataRole::train ? run.train_file : run.validation_file;
}

const std::vector<std::string>& datasets_of(const RunConfig& run, DataRole role) {
  return role == DataRole::train ? run.dataset : run.eval_dataset;
}

fs::path dataset_info_of(const RunConfig& run) {
  return fs::path(run.dataset_dir) / "dataset_info.json";
}

/// A token shard, or a directory with some.
bool is_token_shards(const fs::path& path) {
  const auto is_shard = [](const fs::path& file) { return file.extension() == ".safetensors"; };
  std::error_code ignored;
  if (!fs::is_directory(path, ignored)) return is_shard(path) && fs::exists(path, ignored);
  return std::ranges::any_of(fs::directory_iterator(path, ignored), is_shard,
                             [](const fs::directory_entry& entry) { return entry.path(); });
}

/// The package of this program's source tree, or the one that is installed with it.
fs::path find_tool() {
  std::error_code ignored;
  const fs::path program = fs::read_symlink("/proc/self/exe", ignored);
  const std::array<fs::path, 2> places{
      program.parent_path().parent_path() / "share" / "layerstream" / "tools" / "prepare_data",
      fs::path(LAYERSTREAM_TOOLS) / "prepare_data"};
  for (const fs::path& place : places) {
    if (fs::exists(place / "__main__.py", ignored)) return place;
  }
  throw ConfigError(fmt::format(
      "dataset: needs layerstream's tools/prepare_data, which is neither {} nor {}; put it there, or "
      "prepare the data where it is and name the token shards in train_file",
      places[0].string(), places[1].string()));
}

std::string_view name_of(MixStrategy strategy) {
  switch (strategy) {
    case MixStrategy::concat:
      return "concat";
    case MixStrategy::interleave_under:
      return "interleave_under";
    case MixStrategy::interleave_over:
      return "interleave_over";
  }
  return {};
}

/// As the tool has it. Plain text is split where rows are laid; of all else a second half means nothing.
std::string_view name_of(Overlong overlong) {
  switch (overlong) {
    case Overlong::split:
      return "keep-text";
    case Overlong::truncate:
      return "truncate";
    case Overlong::drop:
      return "drop";
    case Overlong::error:
      return "error";
  }
  return {};
}

std::vector<std::string> tool_command(const RunConfig& run, DataRole role, const fs::path& model_config) {
  std::vector<std::string> command{run.python, find_tool().string()};
  const auto add = [&](std::string_view option, std::string value) {
    // One argument, so that a value may begin with a dash.
    if (!value.empty()) command.push_back(fmt::format("{}={}", option, value));
  };
  add("--tokenizer", run.tokenizer_name.empty() ? run.model_name_or_path : run.tokenizer_name);
  add("--model-config", model_config.string());
  if (fs::exists(dataset_info_of(run))) add("--dataset-info", dataset_info_of(run).string());
  add("--cutoff-len", std::to_string(run.cutoff_len));
  add("--overlong", std::string(name_of(run.overlong)));
  add("--on-bad-line", run.on_bad_line == OnBadLine::skip ? "skip" : "error");
  add("--chat-template-file", run.chat_template);
  if (run.train_on_prompt) command.emplace_back("--train-on-prompt");
  if (run.mask_history) command.emplace_back("--mask-history");
  // Held-out data is what it is: it follows one after the other, all of it. The seed counts where it matters,
  // so that another one does not make the same tokens again.
  if (role == DataRole::train && run.mix_strategy != MixStrategy::concat) {
    add("--mix-strategy", std::string(name_of(run.mix_strategy)));
    add("--interleave-probs", fmt::format("{}", fmt::join(run.interleave_probs, ",")));
    add("--seed", std::to_string(run.seed));
  }
  if (run.tokenized_path.empty()) {
    add("--cache", (fs::path(run.dataset_dir) / ".layerstream").string());
  } else {
    add("--output", (fs::path(run.tokenized_path) / (role == DataRole::train ? "train" : "eval")).string());
  }
  command.emplace_back("--print-shards");
  command.emplace_back("--");
  const std::vector<std::string>& datasets = datasets_of(run, role);
  command.insert(command.end(), datasets.begin(), datasets.end());
  return command;
}

/// Takes what the tool writes: paths of shards on standard output; reports, progress and errors on the other.
class ToolOutput {
 public:
  explicit ToolOutput(const PreparationHooks& hooks) : hooks_(hooks) {}

  void add(ChildProcess::Stream stream, std::string_view line) {
    if (stream == ChildProcess::Stream::out) {
      shards_.emplace_back(line);
      return;
    }
    // An error is the last that it says.
    if (!error_.empty() || is_refusal(line) || line.starts_with("Traceback ")) {
      error_ += fmt::format("{}{}", error_.empty() ? "" : "\n", line);
      return;
    }
    if (hooks_.say) hooks_.say(line);
    last_lines_.emplace_back(line);
    if (last_lines_.size() > max_lines_) last_lines_.pop_front();
  }

  const std::vector<std::string>& shards() const { return shards_; }
  /// What the tool refused, in its own words; empty if it ended in another way.
  std::string refusal() const { return is_refusal(error_) ? error_ : std::string(); }
  std::string last_words() const {
    return error_.empty() ? fmt::format("{}", fmt::join(last_lines_, "\n")) : error_;
  }

 private:
  static constexpr std::size_t max_lines_ = 10;

  static bool is_refusal(std::string_view line) {
    return line.starts_with("prepare_data: ") || line.starts_with("usage: ");
  }

  const PreparationHooks& hooks_;
  std::vector<std::string> shards_;
  std::deque<std::string> last_lines_;
  std::string error_;
};

std::string with_command(const std::string& message, const std::vector<std::string>& command) {
  return fmt::format("{}\nThe command, to run it by hand: {}", message, shell_line(command));
}

void check_end(const ChildExit& end, const ToolOutput& output, const std::vector<std::string>& command) {
  if (end.code == 0 && !output.shards().empty()) return;
  if (const std::string refusal = output.refusal(); end.code > 0 && !refusal.empty()) {
    throw ConfigError(with_command(refusal, command));
  }
  std::string how = fmt::format("ended with exit code {}", end.code);
  if (end.signal != 0) {
    how = fmt::format("was killed by signal {}{}", end.signal,
                      end.signal == SIGKILL ? ", maybe for want of memory" : "");
  } else if (end.code == 0) {
    how = "named no token shards";
  }
  const std::string words = output.last_words();
  throw Error(with_command(
      fmt::format("prepare_data, run by {}, {}{}{}", command.front(), how, words.empty() ? "" : ":\n", words),
      command));
}

std::vector<std::string> run_tool(const std::vector<std::string>& command, const PreparationHooks& hooks) {
  ToolOutput output(hooks);
  ChildExit end;
  try {
    end = run_child(command, {.line = [&](auto stream, std::string_view line) { output.add(stream, line); },
                              .poll = hooks.poll});
  } catch (const std::system_error& error) {
    throw ConfigError(with_command(
        fmt::format(
            "python: {} cannot be run to prepare the dataset: {}; name a Python 3.9 or later that has "
            "the packages tokenizers and jinja2 (pip install tokenizers jinja2), or name token shards "
            "in train_file",
            command.front(), error.code().message()),
        command));
  }
  check_end(end, output, command);
  return output.shards();
}

/// Whether they are token shards. Throws ConfigError if only some of them are.
bool all_token_shards(const RunConfig& run, DataRole role) {
  const std::vector<std::string>& datasets = datasets_of(run, role);
  const auto other = std::ranges::find_if_not(datasets, is_token_shards);
  const auto shards = std::ranges::find_if(datasets, is_token_shards);
  if (shards == datasets.end()) return false;
  const std::string_view key = data_key(run, role);
  if (other != datasets.end()) {
    throw ConfigError(fmt::format(
        "{}: '{}' holds token shards, '{}' does not; prepare that one as well (tools/prepare_data), "
        "or name only datasets that are not tokenized yet",
        key, *shards, *other));
  }
  if (role == DataRole::train && run.mix_strategy != MixStrategy::concat) {
    throw ConfigError(fmt::format(
        "mix_strategy: {} draws from datasets that are not tokenized yet, and {}: '{}' holds token shards",
        name_of(run.mix_strategy), key, *shards));
  }
  return true;
}

void check_exist(const RunConfig& run, DataRole role) {
  if (fs::exists(dataset_info_of(run))) return;  // it may name them
  for (const std::string& dataset : datasets_of(run, role)) {
    if (fs::exists(dataset)) continue;
    throw ConfigError(fmt::format(
        "{}: '{}' is neither a file nor a directory, and dataset_dir has no {} that could name it",
        data_key(run, role), dataset, dataset_info_of(run).string()));
  }
}

}  // namespace

std::string_view data_key(const RunConfig& run, DataRole role) {
  const bool is_train = role == DataRole::train;
  if (!datasets_of(run, role).empty()) return is_train ? "dataset" : "eval_dataset";
  if (!files_of(run, role).empty()) return is_train ? "train_file" : "validation_file";
  return {};
}

std::optional<std::vector<std::string>> ready_inputs(const RunConfig& run, DataRole role) {
  if (datasets_of(run, role).empty()) return files_of(run, role);
  if (all_token_shards(run, role)) return datasets_of(run, role);
  return std::nullopt;
}

std::vector<std::string> prepared_inputs(const RunConfig& run, DataRole role, const fs::path& model_config,
                                         const PreparationHooks& hooks) {
  const std::vector<std::string>& datasets = datasets_of(run, role);
  if (std::optional<std::vector<std::string>> ready = ready_inputs(run, role)) {
    if (hooks.say && !datasets.empty()) {
      hooks.say(fmt::format("{}: token shards already, read as they are", fmt::join(datasets, ", ")));
    }
    return *std::move(ready);
  }
  check_exist(run, role);
  return run_tool(tool_command(run, role, model_config), hooks);
}

}  // namespace layerstream::io
