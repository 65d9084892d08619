"""Tokens per second of plain PyTorch + transformers training of the same model on the CPU, to be read
beside benches/train_step.

    python tools/benches/torch_train_step.py CONFIG_JSON [--rows 4] [--tokens 256] [--steps 10] [--dtype fp32]

fp32: weights, gradients and AdamW in fp32. bf16: autocast over fp32 weights.
"""

import argparse
import time

import torch
import transformers


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--checkpointing", action="store_true", help="recompute each layer, as policy `input` does")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(1)
    config = transformers.AutoConfig.from_pretrained(arguments.config)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    model.train()
    if arguments.checkpointing:
        model.gradient_checkpointing_enable()
        model.config.use_cache = False
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    ids = torch.randint(0, config.vocab_size, (arguments.rows, arguments.tokens))
    seconds = []
    for step in range(arguments.steps + 2):
        start = time.perf_counter()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=arguments.dtype == "bf16"):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step >= 2:
            seconds.append(time.perf_counter() - start)
    median = sorted(seconds)[len(seconds) // 2]
    parameters = sum(p.numel() for p in model.parameters())
    tokens = arguments.rows * arguments.tokens
    print(
        f"torch {torch.__version__}, {parameters} parameters, {arguments.rows} x {arguments.tokens} tokens, "
        f"{arguments.dtype}, checkpointing {arguments.checkpointing}, {arguments.threads} threads\n"
        f"tokens/s {tokens / median:.0f} (median), model GFLOP/s {6 * parameters * tokens / median * 1e-9:.1f}"
    )


if __name__ == "__main__":
    main()
