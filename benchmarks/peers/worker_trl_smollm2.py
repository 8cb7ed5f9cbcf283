"""Train the real model of benchmarks/real_model.py with TRL's GRPOTrainer, on a CPU in float32.

Arguments: the model's folder, a file with what is asked (JSON: records, held_out, and the numbers
of the recipe). Writes update_lines.py's line for every update, and one with the accuracies.
Its best settings: transformers' own generation, all answers in one batch, no gradient
checkpointing, no reference, micro-batches that fit the memory. Its loss "dapo" is the recipe's:
PPO's clip, averaged over all tokens of the update, not of each micro-batch. On policy: its answers
are sampled with the weights that they train.
"""

import json
import sys
from typing import Any

from update_lines import UpdateLines


def greedy_accuracy(trainer: Any, tokenizer: Any, records: list[Any], new_tokens: int) -> float:
    """Return the share of records that greedy decoding answers with the number alone."""
    import torch

    tokenizer.padding_side = "left"
    inputs = tokenizer.apply_chat_template(
        [record["messages"] for record in records],
        add_generation_prompt=True,
        padding=True,
        return_dict=True,
        return_tensors="pt",
    )
    trainer.model.eval()
    with torch.no_grad():
        out = trainer.model.generate(**inputs, do_sample=False, max_new_tokens=new_tokens)
    trainer.model.train()
    texts = tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    right = [t.strip() == r["answer"] for t, r in zip(texts, records, strict=True)]
    return sum(right) / len(right)


def made_trainer(folder: str, job: dict[str, Any], tokenizer: Any, watch: Any) -> Any:
    """Return TRL's trainer; watch.reward scores, watch sees every step end."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    data = [{"prompt": r["messages"], "answer": r["answer"]} for r in job["records"]]
    trainer = GRPOTrainer(
        model=folder,
        processing_class=tokenizer,
        reward_funcs=watch.reward,
        train_dataset=Dataset.from_list(data),
        callbacks=[watch],
        peft_config=LoraConfig(r=job["rank"], lora_alpha=job["alpha"], target_modules="all-linear"),
        args=GRPOConfig(
            output_dir="trl",
            max_steps=job["steps"],
            seed=job["seed"],
            num_generations=job["samples"],
            per_device_train_batch_size=job["rows"],
            gradient_accumulation_steps=job["prompts"] * job["samples"] // job["rows"],
            max_completion_length=job["new_tokens"],
            temperature=1.0,
            learning_rate=job["learning_rate"],
            adam_beta1=job["betas"][0],
            adam_beta2=job["betas"][1],
            weight_decay=job["weight_decay"],
            max_grad_norm=job["max_grad_norm"],
            loss_type="dapo",
            epsilon=0.2,
            beta=0.0,
            num_iterations=1,
            use_vllm=False,
            use_cpu=True,
            bf16=False,
            model_init_kwargs={"dtype": "float32"},
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            logging_steps=10**6,
        ),
    )
    trainer.create_optimizer()  # the recipe's warm-up begins above 0, transformers' at 0
    trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
        trainer.optimizer, lambda step: job["shape"][min(step, job["steps"] - 1)]
    )
    return trainer


def main() -> None:
    """Train and evaluate."""
    lines = UpdateLines()
    with open(sys.argv[2], encoding="utf-8") as file:
        job = json.load(file)
    from transformers import AutoTokenizer, TrainerCallback

    class Watch(TrainerCallback):
        """Scores answers, and sees each step end."""

        mean = 0.0
        __name__ = "Watch"

        def reward(self, completions: Any, answer: Any, **_: Any) -> list[float]:
            texts = [completion[-1]["content"] for completion in completions]
            scores = [float(t.strip() == a) for t, a in zip(texts, answer, strict=True)]
            self.mean = sum(scores) / len(scores)
            return scores

        def on_step_end(self, *_: Any, **__: Any) -> None:
            lines.ended(reward=self.mean)

    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    trainer = made_trainer(sys.argv[1], job, tokenizer, Watch())
    held_out = job["held_out"], job["new_tokens"]
    before = greedy_accuracy(trainer, tokenizer, *held_out)
    lines.ended()
    trainer.train()
    after = greedy_accuracy(trainer, tokenizer, *held_out)
    lines.ended(accuracy_before=before, accuracy_after=after)


if __name__ == "__main__":
    main()
