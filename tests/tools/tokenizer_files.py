"""Tokenizers and chat templates for tests: small ones that go the way of those that people use."""

import json

from needed_packages import missing

MISSING = missing("jinja2", "tokenizers")

# The way Qwen2.5's template goes, without its tools.
CHATML = """\
{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- BEGIN %}
        {{- message.content + '<|im_end|>' + '\\n' }}
        {%- END %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
CHATML_MARKED = CHATML.replace("BEGIN", "generation").replace("END", "endgeneration")
CHATML = CHATML.replace("BEGIN", "if true").replace("END", "endif")
# The way Llama 3's template goes: header, blank line, trimmed content.
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim"
    " + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}"
    "{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# As Qwen3's: reasoning stays only in the last turn.
FORGETFUL = CHATML.replace(
    "message.content + '<|im_end|>'",
    "(message.content if loop.last else message.content.split('</think>')[-1]) + '<|im_end|>'",
)
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|bos|>"]


def make_tokenizer(directory, template=CHATML, bos=False, **config):
    """A byte-level BPE that knows a few words, "\\n\\n" and ".\\n\\n", with the post-processor of Llama 3."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        show_progress=False,
    )
    tokenizer.train_from_iterator(["hello world user assistant system\n\n\n\n\n\n\n\n"] * 20, trainer)
    post = [processors.ByteLevel(trim_offsets=True)]
    if bos:
        post.append(processors.TemplateProcessing("<|bos|> $A", special_tokens=[("<|bos|>", SPECIAL.index("<|bos|>"))]))
    tokenizer.post_processor = processors.Sequence(post)
    tokenizer.enable_truncation(4)  # as some models have it in the file; transformers does not apply it
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<|bos|>", "eos_token": {"__type": "AddedToken", "content": "<|end|>"}, "chat_template": template, **config}
    config = {key: value for key, value in config.items() if value is not None}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def turns(*contents):
    """user, assistant, user, ..."""
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
