"""Train the small model that ships with ingot: public-domain text in, a Hugging Face directory out.

The model is Llama-shaped (hidden 256, head_dim 64, GQA 2:1, intermediate 768) so that real weights run through the
same wide kernel paths as large models. The learning-rate schedule follows wall-clock time, so a slower machine
trains fewer steps instead of longer. Needs torch, transformers and tokenizers (`pip install .[hf]`).

    python -m tests.programs.train_shipped_model --text war-and-peace.txt --text tinyshakespeare.txt --output model
"""

import argparse
import json
import math
import re
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

VOCAB = 2560
CONTEXT = 512
BATCH = 8  # sequences per step: 4,096 tokens
PEAK_LR = 3e-3


def read_paragraphs(path: Path) -> str:
    """Undo the hard line wraps of prose; keep line breaks of verse and dialogue (short lines)."""
    text = path.read_text(encoding="utf-8").replace("\r\n", "\n")
    wrapped = max(len(line) for line in text.split("\n", 2000)[:2000]) > 65
    if wrapped and "Shakespeare" not in path.stem and "shakespeare" not in path.stem:
        text = re.sub(r"(?<!\n)\n(?!\n)", " ", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def train_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((part for text in texts for part in text.split("\n\n")), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def learning_rate(progress: float) -> float:
    """Short warm-up, then cosine to a tenth; `progress` is the elapsed share of the time budget."""
    if progress < 0.02:
        return PEAK_LR * progress / 0.02
    return PEAK_LR * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0))))


def mean_loss(model: LlamaForCausalLM, ids: torch.Tensor) -> float:
    """Mean cross-entropy in nats per token over consecutive windows of `ids`."""
    model.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for start in range(0, len(ids) - CONTEXT, CONTEXT):
            window = ids[start : start + CONTEXT].clone()
            window[0] = 1
            total += model(input_ids=window[None], labels=window[None]).loss.item() * (CONTEXT - 1)
            count += CONTEXT - 1
    model.train()
    return total / count


def new_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config)


def new_optimizer(model: LlamaForCausalLM) -> torch.optim.Optimizer:
    decay = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95))


def train(model: LlamaForCausalLM, ids: torch.Tensor, seconds: float) -> int:
    """Train for `seconds` of wall-clock time on random windows of `ids`; the number of steps."""
    optimizer = new_optimizer(model)
    begin, step = time.monotonic(), 0
    while (progress := (time.monotonic() - begin) / seconds) < 1:
        starts = torch.randint(0, len(ids) - CONTEXT, (BATCH,)).tolist()
        batch = torch.stack([ids[s : s + CONTEXT] for s in starts])
        batch[:, 0] = 1  # every window begins like a prompt: with <s>
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(progress)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 50 == 0:
            print(f"step {step}  {100 * progress:5.1f} %  loss {loss.item():.3f}", flush=True)
    return step


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, output: Path) -> None:
    """Write the Hugging Face directory."""
    output.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(
        bos_token_id=1, eos_token_id=2, do_sample=True, temperature=0.7, top_k=40
    )
    model.save_pretrained(output)
    tokenizer.save(str(output / "tokenizer.json"))
    facts = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "model_max_length": CONTEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (output / "tokenizer_config.json").write_text(json.dumps(facts, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", action="append", required=True, type=Path)
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--minutes", type=float, default=40)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)

    texts = [read_paragraphs(path) for path in args.text]
    tokenizer = train_tokenizer(texts)
    encoded = [torch.tensor(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts]
    parts = [ids[: int(len(ids) * 0.98)] for ids in encoded]
    held_out = torch.cat([ids[int(len(ids) * 0.98) :] for ids in encoded])
    joined = torch.cat(parts)
    print(
        f"{sum(map(len, texts)):,} characters, {len(joined):,} training and {len(held_out):,} held-out tokens",
        flush=True,
    )

    model = new_model()
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    steps = train(model, joined, args.minutes * 60)
    model = model.to(torch.bfloat16)
    save(model, tokenizer, args.output)
    held = mean_loss(model.float(), held_out)
    seen = steps * BATCH * CONTEXT
    print(f"steps {steps}, tokens seen {seen:,}, held-out loss {held:.3f} nats per token (bf16 weights)", flush=True)


if __name__ == "__main__":
    main()
