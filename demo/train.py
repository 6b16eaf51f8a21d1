#!/usr/bin/env python3
"""Train the demo model and its five style adapters, or measure them.

Without options this writes the training text, trains the tokenizer, the base
model and all adapters, and measures the result.  Everything depends on the seed
only (apart from the rounding of multi-threaded sums).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import random
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
TOOL_SHARE, STYLED_TOOL_SHARE = 0.5, 0.2  # of the conversations for the base model and for an adapter


def options() -> argparse.Namespace:
    """The command line."""
    p = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="At 6500 tokens/s (two idle cores) the base model takes about 30 minutes, an adapter a few, "
        "the measurement one or two.",
    )
    p.add_argument("--base", action="store_true", help="train the tokenizer and the base model")
    p.add_argument(
        "--more",
        action="store_true",
        help="train the base model in --out further on new text, at a lower rate; with --adapters these instead of it",
    )
    p.add_argument(
        "--adapters",
        nargs="*",
        metavar="NAME",
        help="train these adapters (no name: all five) on the base model in --out",
    )
    p.add_argument(
        "--check",
        action="store_true",
        help="measure recall and style on held-out words; the last line is JSON",
    )
    p.add_argument(
        "--out",
        type=pathlib.Path,
        default=HERE,
        metavar="FOLDER",
        help="folder holding model/ and adapters/ (default: this file's folder)",
    )
    p.add_argument("--seed", type=int, default=7, help="seed of text and weights (default: 7)")
    p.add_argument(
        "--tokens",
        type=float,
        default=10.5,
        metavar="M",
        help="base training length in million tokens (default: 10.5)",
    )
    p.add_argument(
        "--minutes",
        type=float,
        default=math.inf,
        metavar="N",
        help="end base training after this time even if fewer tokens were seen; the "
        "schedule is stretched to fit (default: no limit)",
    )
    p.add_argument(
        "--adapter-tokens",
        type=float,
        default=0.5,
        metavar="M",
        help="training length of one adapter in million tokens (default: 0.5)",
    )
    p.add_argument(
        "--batch-tokens",
        type=int,
        default=6144,
        metavar="N",
        help="tokens per optimizer step of the base model, padding included; adapters take a "
        "quarter (default: 6144)",
    )
    p.add_argument("--threads", type=int, default=2, help="processor cores to use (default: 2)")
    p.add_argument(
        "--save-every",
        type=float,
        default=300,
        metavar="SECONDS",
        help="write a checkpoint this often during base training (default: 300)",
    )
    return p.parse_args()


class Batches:
    """An endless stream of (ids, mask) tensors [rows, length] of similar token count.

    Conversations are generated in pools, sorted by length and cut into batches,
    so that little is wasted on padding; each row is one conversation.
    """

    def __init__(self, encoder, seed: int | str, batch_tokens: int, style: str | None = None):
        self.encoder, self.style, self.batch_tokens = encoder, style, batch_tokens
        self.rng = random.Random(f"{seed}/{style}")
        self.ready: list = []

    def next(self, progress: float):
        """The next batch; ``progress`` (0 to 1) sets how long the conversations get."""
        if not self.ready:
            self.refill(progress)
        return self.ready.pop()

    def refill(self, progress: float) -> None:
        """Generate a pool of conversations and cut it into batches."""
        rows = [self.encoder.encode(self.conversation(progress)) for _ in range(400)]
        rows = sorted((r for r in rows if len(r[0]) <= 1400), key=lambda r: len(r[0]))
        batch: list = []
        for row in rows:
            if batch and len(row[0]) * (len(batch) + 1) > self.batch_tokens:
                self.ready.append(self.pad(batch))
                batch = []
            batch.append(row)
        self.ready.append(self.pad(batch))
        self.rng.shuffle(self.ready)

    def conversation(self, progress: float) -> list:
        """The next conversation; some offer tools."""
        import text
        import tool_talks

        if self.rng.random() < (STYLED_TOOL_SHARE if self.style else TOOL_SHARE):
            return tool_talks.conversation(self.rng, self.style)
        return text.conversation(self.rng, progress, self.style)

    def pad(self, rows: list):
        """Right-pad the rows to a common length."""
        import torch

        width = max(len(ids) for ids, _ in rows)
        filler = self.encoder.id["<|pad|>"]
        ids = torch.tensor([r + [filler] * (width - len(r)) for r, _ in rows])
        mask = torch.tensor([m + [0] * (width - len(m)) for _, m in rows])
        return ids, mask


class Progress:
    """Prints loss, speed and remaining time every few seconds."""

    def __init__(self, label: str, total: float):
        self.label, self.total, self.done = label, total, 0
        self.start = self.last = time.monotonic()
        self.loss = None

    def add(self, tokens: int, loss: float, fraction: float = 0.0) -> None:
        """Account for one step of ``tokens`` tokens; ``fraction`` is the part done by time."""
        self.done += tokens
        self.loss = loss if self.loss is None else 0.95 * self.loss + 0.05 * loss
        now = time.monotonic()
        if now - self.last > 10 or self.done >= self.total:
            part = min(1.0, max(fraction, self.done / self.total))
            eta = self.seconds * (1 / part - 1)
            print(
                f"{self.label}: {self.done / 1e6:5.2f}/{self.total / 1e6:.2f} M tokens  "
                f"loss {self.loss:.4f}  {self.done / self.seconds:5.0f} tokens/s  "
                f"ETA {int(eta) // 60}:{int(eta) % 60:02d}",
                flush=True,
            )
            self.last = now

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.start


def rate_at(fraction: float) -> float:
    """The learning-rate factor: a short warm-up, a plateau, a linear way down to zero."""
    return min(1.0, fraction / 0.02 + 0.02, max(0.0, (1 - fraction) / 0.55))


def start_model(args: argparse.Namespace, folder: pathlib.Path):
    """A fresh model and tokenizer, or with ``--more`` the ones in the folder."""
    import check
    import network
    import torch
    import vocab

    torch.manual_seed(args.seed)
    if args.more:
        model, before = check.load(folder)
        tokenizer = vocab.with_form(before)
        fresh = [i for t, i in tokenizer.get_vocab().items() if before.token_to_id(t) != i]
        with torch.no_grad():  # new tokens start in the middle of the old ones
            rows = model.model.embed_tokens.weight
            rows[fresh] = rows.mean(0) + 0.02 * torch.randn(len(fresh), rows.size(1))
        vocab.save(tokenizer, folder)
        return model, tokenizer
    tokenizer = vocab.build(args.seed)
    vocab.save(tokenizer, folder)
    end, pad = (tokenizer.token_to_id(t) for t in (vocab.END, vocab.PAD))
    return network.new_model(tokenizer.get_vocab_size(), end, pad), tokenizer


def train_base(args: argparse.Namespace) -> None:
    """Tokenizer and base model, written to ``out/model``."""
    import network
    import torch
    import vocab

    folder = args.out / "model"
    model, tokenizer = start_model(args, folder)
    encoder = vocab.Encoder(tokenizer)
    print(
        f"base: {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, "
        f"{tokenizer.get_vocab_size()} tokens in the vocabulary",
        flush=True,
    )
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    workers = network.Workers(model, matrices + others, args.threads)
    muon = network.Muon(matrices)
    adam = torch.optim.AdamW(others, lr=4e-3, betas=(0.9, 0.97), weight_decay=0.0)
    batches = Batches(encoder, f"{args.seed}/more" if args.more else args.seed, args.batch_tokens)
    peak = 0.4 if args.more else 1.0  # relative to the rates below
    progress, saved = Progress("base", args.tokens * 1e6), 0.0
    while progress.done < progress.total:
        fraction = max(progress.done / progress.total, progress.seconds / 60 / args.minutes)
        if fraction >= 1:
            break
        ids, mask = batches.next(1.0 if args.more else fraction)
        loss = workers.gradients(ids, mask)
        factor = peak * rate_at(fraction)
        adam.param_groups[0]["lr"] = 4e-3 * factor
        torch.nn.utils.clip_grad_norm_(others, 1.0)
        adam.step()
        muon.step(0.02 * factor, workers)
        progress.add(ids.numel(), loss, fraction)
        if progress.seconds - saved > args.save_every:
            saved = progress.seconds
            network.save_model(model, folder)
    network.save_model(model, folder)
    print(f"base: done in {progress.seconds / 60:.1f} minutes", flush=True)


def train_adapter(args: argparse.Namespace, name: str) -> None:
    """One style adapter, written to ``out/adapters/<name>``."""
    import check
    import network
    import styles
    import torch
    import vocab

    torch.manual_seed(args.seed)
    rank = styles.RANKS[name]
    alpha = 2 * rank
    model, tokenizer = check.load(args.out / "model")
    encoder = vocab.Encoder(tokenizer)
    if args.more:
        params = network.load_lora(model, args.out / "adapters" / name)
    else:
        params = network.add_lora(model, rank, alpha)
    workers = network.Workers(model, params, args.threads)
    optimizer = torch.optim.AdamW(params, lr=1e-3, betas=(0.9, 0.97), weight_decay=0.0)
    peak = (0.5 if args.more else 1.0) * 4e-3 / math.sqrt(rank / 8)  # wider adapters move further per step
    seed = f"{args.seed}/more" if args.more else args.seed
    batches = Batches(encoder, seed, args.batch_tokens // 4, style=name)
    progress = Progress(f"{name} (rank {rank})", args.adapter_tokens * 1e6)
    while progress.done < progress.total:
        fraction = progress.done / progress.total
        ids, mask = batches.next(1.0)
        loss = workers.gradients(ids, mask)
        optimizer.param_groups[0]["lr"] = peak * rate_at(fraction)
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        progress.add(ids.numel(), loss)
    network.save_lora(model, args.out / "adapters" / name, rank, alpha)


def main() -> int:
    """Run what the command line asks for; everything when it asks for nothing."""
    args = options()
    os.environ.setdefault("OMP_NUM_THREADS", str(args.threads))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import styles
    import torch

    torch.set_num_threads(args.threads)
    everything = not (args.base or args.more or args.check or args.adapters is not None)
    unknown = set(args.adapters or ()) - set(styles.NAMES)
    if unknown:
        print(
            f"no such adapter: {', '.join(sorted(unknown))}; there are {', '.join(styles.NAMES)}",
            file=sys.stderr,
        )
        return 2
    if args.base or (args.more and args.adapters is None) or everything:
        train_base(args)
    if args.adapters is not None or everything:
        for name in args.adapters or styles.NAMES:
            train_adapter(args, name)
    if args.check or everything:
        import check

        report = check.run(args.out, args.seed)
        print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
