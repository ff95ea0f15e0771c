"""fusestep under Hugging Face's Trainer: two lines convert the model and choose the optimizer.

    pip install 'fusestep[integrations]'
    python examples/hugging_face_trainer.py

A small Llama with random weights learns sequences that count upwards. `--fp8` multiplies its blocks in FP8.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import fusestep
from fusestep.fp8 import DelayedScaling
from fusestep.optim import FusedAdam

VOCABULARY = 64


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Sequence k is k, k + 1, k + 2, … modulo the vocabulary."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, k: int) -> dict[str, torch.Tensor]:
        tokens = (k + torch.arange(32)) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small Llama with Trainer and fusestep.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--fp8", action="store_true", help="multiply in FP8, emulated where the chip lacks it")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            bos_token_id=1,
            eos_token_id=2,
        )
    )

    # In place, and before Trainer wraps the model. The table says what became of each module, and why.
    report = fusestep.convert(model, fp8=DelayedScaling() if arguments.fp8 else None)
    print(report)

    # Clipping is part of the optimizer's step, so Trainer need not clip.
    optimizer = FusedAdam(model.parameters(), lr=3e-3, weight_decay=0.01, max_grad_norm=1.0)
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            max_steps=arguments.steps,
            per_device_train_batch_size=16,
            max_grad_norm=0.0,
            bf16=True,
            use_cpu=not torch.cuda.is_available(),
            lr_scheduler_type="cosine",
            warmup_steps=5,
            logging_steps=max(1, arguments.steps // 4),
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(model=model, args=settings, train_dataset=Counting(), optimizers=(optimizer, None))
        trainer.train()

        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        print(f"loss {float(losses[0]):.3f} -> {float(losses[-1]):.3f}")

        # Names in the state dict are the old ones: what is saved here loads into the plain model, and back.
        trainer.save_model(folder)
        plain = LlamaForCausalLM.from_pretrained(folder)
        print("loaded as", type(plain.model.norm).__name__)

    # The classes that the model had. Trainer's mixed precision wraps the forward: unwrap it first.
    trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_fp32_wrapper=False)
    report.undo()
    print("undone:", type(model.model.norm).__name__)


if __name__ == "__main__":
    main()
