"""Run transformers on CPU torch: static `generate` or continuous batching, as argv[2] says.

Static: batches of the concurrency, equal prompts (no padding), each run to its longest answer.
Continuous: its own `generate_batch`, pages for all sequences at once.
"""

import sys

from worker import Generate, serve, static_batches


def load(folder: str) -> tuple[Generate, str]:
    """Load a float32 causal language model."""
    import torch
    import transformers

    torch.set_num_threads(2)
    continuous = len(sys.argv) > 2 and sys.argv[2] == "continuous"
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="sdpa",
    ).eval()

    @torch.inference_mode()
    def static(prompts: list[list[int]], lengths: list[int], concurrency: int) -> int:
        computed = 0
        for batch, longest in static_batches(prompts, lengths, concurrency):
            model.generate(
                torch.tensor(batch),
                attention_mask=torch.ones(len(batch), len(batch[0]), dtype=torch.long),
                do_sample=True,
                top_k=0,
                min_new_tokens=longest,
                max_new_tokens=longest,
                pad_token_id=0,
            )
            computed += longest * len(batch)
        return computed

    def batching(prompts: list[list[int]], lengths: list[int], concurrency: int) -> int:
        computed = 0
        # its API has one length per call, so call it with groups of similar length
        for batch, longest in static_batches(prompts, lengths, concurrency):
            config = transformers.GenerationConfig(
                max_new_tokens=longest, do_sample=True, eos_token_id=-1, pad_token_id=0
            )
            done = model.generate_batch(
                inputs=batch,
                generation_config=config,
                continuous_batching_config=transformers.ContinuousBatchingConfig(
                    page_size=32, num_blocks=6 * concurrency, max_batch_tokens=2048
                ),
                progress_bar=False,
            )
            computed += sum(len(d.generated_tokens) for d in done.values())
        return computed

    return (batching if continuous else static), transformers.__version__


if __name__ == "__main__":
    serve(load)
