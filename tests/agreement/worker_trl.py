"""TRL's own losses on given arrays. Run with TRL's interpreter:

    worker_trl.py ARRAYS.npz OUT.npz [ARRAYS.npz OUT.npz ...]

A trainer is made without its constructor: its configuration, the attributes that the loss reads,
and stubs for what would run a model or generate. The loss and the advantages are TRL's code.
"""

import json
import sys
import tempfile
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import torch
import trl
from accelerate import Accelerator
from trl import (
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOTrainer,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
)
from trl.experimental.async_grpo import AsyncGRPOTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.gkd import GKDTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer
from trl.experimental.iw_opd import IWOPDTrainer
from trl.experimental.orpo import ORPOTrainer
from trl.trainer import distillation_trainer

PAD = 0


class Model:
    """Stands where a model would: says what it was given."""

    training, is_gradient_checkpointing = True, False
    _modules = None  # accelerate asks for them where peft is installed: there are none

    def __init__(self, answer=None):
        self.answer = answer

    def __call__(self, *_, **inputs):
        return self.answer(inputs)


def stub(trainer, **attributes):
    """An instance of a trainer that has only what its loss reads."""
    made = object.__new__(trainer)
    shared = {
        "accelerator": Accelerator(cpu=True),  # made here: a configuration resets what it holds
        "model": Model(),
        "_metrics": {"train": defaultdict(list)},
        "aux_loss_enabled": False,
    }
    made.__dict__.update(shared | attributes)
    return made


def loss_and_gradient(function, at):
    """function's value and its gradient with respect to the one array it gets."""
    x = torch.tensor(at, requires_grad=True)
    loss = function(x)
    loss.backward()
    return {"loss": loss.detach().numpy(), "gradient": x.grad.numpy()}


# --- policy gradients -----------------------------------------------------------------------------


def online(trainer, config, arrays, settings):
    """An online trainer whose generation and forward passes are the arrays."""
    batch, length = arrays["mask"].shape
    args = config(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        report_to=[],
        per_device_train_batch_size=batch,
        num_generations=int(arrays["group_size"]),
        num_iterations=2,  # so that the log-probs at the start of the step are kept
        max_completion_length=length,
        **settings,
    )
    reference = Model()

    class Stubbed(trainer):
        def _generate(self, prompts):
            ids = [np.ones(n, int).tolist() for n in arrays["lengths"]]
            holes = [m[:n].tolist() for m, n in zip(arrays["mask"], arrays["lengths"], strict=True)]
            told = [
                m[:n].tolist() for m, n in zip(arrays["behavior"], arrays["lengths"], strict=True)
            ]
            texts = [""] * batch
            if trainer is RLOOTrainer:
                return [[1]] * batch, ids, texts
            return [[1]] * batch, ids, holes, texts, told if args.use_vllm else None, {}, None, None

        def _calculate_rewards(self, *_):
            return torch.tensor(arrays["rewards"])

        def _get_per_token_logps_and_entropies(self, model, *_, **__):
            frozen = arrays["reference"] if model is reference else arrays["proximal"]
            logprobs = self.policy if torch.is_grad_enabled() else torch.tensor(frozen)
            return logprobs, torch.tensor(arrays["entropy"]), None

    parts = arrays["rewards"].shape[1]
    read = {k: v for k, v in vars(args).items() if not k.startswith("_")} | {
        "args": args,
        "epsilon_low": args.epsilon,
        "epsilon_high": args.epsilon if args.epsilon_high is None else args.epsilon_high,
        "ref_model": reference,
        "reward_weights": torch.ones(parts),
        "reward_funcs": [None] * parts,
        "reward_func_names": [str(i) for i in range(parts)],
        "tools": [],
        "environment_factories": None,
        "environments": None,
        "_tokenizer": SimpleNamespace(pad_token_id=PAD),
        "_entropy_bonus_enabled": getattr(args, "entropy_coef", 0.0) != 0,
        "current_gradient_accumulation_steps": args.gradient_accumulation_steps,
        "_logs": defaultdict(list) | {"rewards": defaultdict(list)},
        "_pending_extra_logs": {},
        "_pending_metrics": {},
    }
    return stub(Stubbed, **read)


def policy(arrays, *, trainer="grpo", rewards="rewards", proximal="proximal", without=None,
           half=None, **settings):  # fmt: skip
    """Loss with the given advantages [sequences]; beside it TRL's own advantages of the rewards.

    without: a sequence with nothing to learn; half: which micro-batch of two alone.
    """
    arrays = {**arrays, "rewards": arrays[rewards], "proximal": arrays[proximal]}
    if without is not None:
        arrays["mask"] = arrays["mask"] & (np.arange(len(arrays["mask"])) != without)[:, None]
    if half is not None:
        settings["gradient_accumulation_steps"] = 2
    made_of = {"grpo": (GRPOTrainer, GRPOConfig), "gmpo": (GMPOTrainer, GMPOConfig),
               "rloo": (RLOOTrainer, RLOOConfig)}  # fmt: skip
    one = online(*made_of[trainer], arrays, settings)
    inputs = one._generate_and_score_completions([{"prompt": ""}] * len(arrays["mask"]))
    own = inputs["advantages"].numpy()
    inputs["advantages"] = torch.tensor(arrays["advantages"])
    if half is not None:
        rows = np.split(np.arange(len(arrays["mask"])), 2)[half]
        inputs = {k: v[rows] if v.ndim else v for k, v in inputs.items()}
        arrays |= {k: arrays[k][rows] for k in ("policy", "entropy")}
    if trainer == "rloo":
        inputs["completion_mask"] = torch.tensor(arrays["mask"]).long()
        inputs["old_logps"] = torch.tensor((arrays["proximal"] * arrays["mask"]).sum(1))

    def loss(logprobs):
        one.policy = logprobs
        return one._compute_loss(one.model, inputs)

    return loss_and_gradient(loss, arrays["policy"]) | {"advantages": own}


def asynchronous(arrays, **settings):
    """AsyncGRPOTrainer: one packed row, the ratio against what drew the tokens."""
    mask = torch.tensor(arrays["mask"]).reshape(1, -1)
    places, rest = torch.arange(mask.numel())[None], -torch.ones(1, 1).long()
    sequence = torch.arange(len(arrays["mask"])).repeat_interleave(arrays["mask"].shape[1])[None]
    shape = arrays["mask"].shape
    inputs = {
        "attention_mask": torch.ones_like(places),
        "input_ids": places,
        "position_ids": places,
        "shift_labels": places,
        "token_index": torch.where(mask, places, -1),
        "old_log_probs": torch.tensor(arrays["behavior"]).reshape(1, -1),
        "advantages": torch.tensor(arrays["advantages"])[:, None].expand(shape).reshape(1, -1),
        "segment_id": sequence,
        "tree_kv_index": rest,
        "tree_cu_seqlens_q": rest,
        "tree_cu_seqlens_k": rest,
        "tree_max_seqlens": torch.ones(1, 2).long(),
        "global_n_tokens": mask.sum()[None],
        "global_n_forward_tokens": mask.sum()[None],
        "mean_seq_len": torch.ones(1),
    }
    counted = ("forward_s", "forward_tokens", "trained_tokens", "seq_len_weighted", "samples")
    settings |= {f"_step_{name}": 0.0 for name in counted}
    one = stub(AsyncGRPOTrainer, current_gradient_accumulation_steps=1, **settings)

    def loss(x):
        flat = x.reshape(1, -1)
        model = Model(lambda _: SimpleNamespace(log_probs=flat, entropy=torch.zeros_like(flat)))
        return one.compute_loss(model, inputs)

    return loss_and_gradient(loss, arrays["policy"])


# --- preferences ----------------------------------------------------------------------------------


def told(logprobs, mask):
    """A model's output: log-probs, 0 where there is nothing to learn, and what is only logged."""
    other = torch.zeros_like(logprobs)
    return SimpleNamespace(
        log_probs=logprobs * mask[:, 1:],
        entropy=other,
        mean_logits=other,
        is_top1=other.bool(),
        logits=None,
    )


def dpo(arrays, *, loss_type, beta=0.1, label_smoothing=0.0):
    """DPOTrainer; [2 pairs, length] log-probs, the chosen answers first."""
    mask = torch.tensor(arrays["pair_mask"]).long()
    reference = Model(lambda _: told(torch.tensor(arrays["pair_reference"]), mask))
    one = stub(
        DPOTrainer,
        ref_model=reference,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        beta=beta,
        label_smoothing=label_smoothing,
        loss_types=[loss_type],
        loss_weights=[1.0],
        ld_alpha=None,
        precompute_ref_logps=False,
        f_divergence_type="reverse_kl",
        use_weighting=False,
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {"input_ids": mask, "attention_mask": mask, "completion_mask": mask}
    return loss_and_gradient(
        lambda x: one._compute_loss(Model(lambda _: told(x, mask)), inputs, False),
        arrays["pair_policy"],
    )


def kto(arrays, *, beta=0.1, desirable_weight=1.0, undesirable_weight=1.0):
    """KTOTrainer; the same log-probs, of answers that are marked good or bad."""
    mask, strangers = torch.tensor(arrays["pair_mask"]).long(), torch.zeros(1).long()
    strangers = mask.flip(0)
    one = stub(
        KTOTrainer,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        beta=beta,
        desirable_weight=desirable_weight,
        undesirable_weight=undesirable_weight,
        loss_type="kto",
        calculate_KL=True,
        precompute_ref_logps=True,
        _total_train_tokens=0,
        _tp_size=1,
    )
    summed = (arrays["pair_reference"] * arrays["pair_mask"][:, 1:]).sum(1)
    inputs = {
        "input_ids": mask,
        "attention_mask": mask,
        "completion_mask": mask,
        "KL_input_ids": strangers,
        "KL_attention_mask": strangers,
        "KL_completion_mask": strangers,
        "label": torch.tensor(arrays["good"]),
        "ref_logps": torch.tensor(summed),
        "ref_KL_logps": torch.tensor(arrays["stranger_reference"]),
    }

    def answer(x, asked):
        if asked["input_ids"] is inputs["KL_input_ids"]:  # one token holds the whole log-prob
            whole = torch.zeros_like(x)
            whole[:, -1] = torch.tensor(arrays["stranger_policy"])
            return told(whole, torch.ones_like(mask))
        return told(x, mask)

    return loss_and_gradient(
        lambda x: one._compute_loss(Model(lambda asked: answer(x, asked)), inputs, False),
        arrays["pair_policy"],
    )


def reference_free(arrays, *, name, beta, gamma=0.0):
    """CPOTrainer as SimPO, ORPOTrainer's odds ratio: of mean log-probs [2 pairs]."""
    if name == "simpo":
        one = stub(CPOTrainer, beta=beta, simpo_gamma=gamma, alpha=0.0, label_smoothing=0.0,
                   loss_type="simpo")  # fmt: skip
        return loss_and_gradient(lambda x: one.cpo_loss(*x.chunk(2))[0].mean(), arrays["means"])
    one = stub(ORPOTrainer, beta=beta)
    return loss_and_gradient(lambda x: -one.odds_ratio_loss(*x.chunk(2))[0].mean(), arrays["means"])


def reward(arrays, *, margin):
    """RewardTrainer; rewards [2 pairs], the chosen first."""
    one = stub(
        RewardTrainer,
        args=SimpleNamespace(center_rewards_coefficient=None),
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {"attention_mask": torch.ones(1)}
    inputs |= {"margin": torch.tensor(arrays["margin"])} if margin else {}

    def loss(x):
        model = Model(lambda _: SimpleNamespace(logits=x[:, None]))
        return one.compute_loss(model, dict(inputs))

    return loss_and_gradient(loss, arrays["pair_rewards"])


# --- distillation ---------------------------------------------------------------------------------


def jsd(arrays, *, beta, temperature=1.0):
    """GKDTrainer.generalized_jsd_loss; logits [sequences, length, vocab]."""
    labels = torch.where(torch.tensor(arrays["mask"]), 1, -100)
    teacher = torch.tensor(arrays["teacher_logits"])
    return loss_and_gradient(
        lambda x: GKDTrainer.generalized_jsd_loss(
            x, teacher, labels=labels, beta=beta, temperature=temperature
        ),
        arrays["logits"],
    )


def chunked_jsd(arrays, *, beta, temperature=1.0):
    """DistillationTrainer's loss in tiles, from hidden states through the head."""
    teacher, head = torch.tensor(arrays["teacher_logits"]), torch.eye(arrays["logits"].shape[-1])
    return loss_and_gradient(
        lambda x: distillation_trainer._chunked_divergence_loss(
            x, teacher, head, head, torch.tensor(arrays["mask"]), beta, temperature=temperature
        )[0],
        arrays["logits"],
    )


def top(arrays, *, beta, k):
    """IWOPDTrainer.generalized_jsd_loss of k tokens and all others as one.

    The k are the teacher's likeliest where beta is 0, the student's where it is 1.
    """
    labels = torch.where(torch.tensor(arrays["mask"]), 1, -100)
    teacher = torch.tensor(arrays["teacher_logits"])
    return loss_and_gradient(
        lambda x: IWOPDTrainer.generalized_jsd_loss(
            x, teacher, labels=labels, beta=beta, top_k=k, add_tail=True
        ),
        arrays["logits"],
    )


def token(arrays):
    """IWOPDTrainer's reverse KL of the drawn token and all others as one."""
    one = stub(IWOPDTrainer, beta=1, loss_add_tail=True)
    labels, ids = torch.where(torch.tensor(arrays["mask"]), 1, -100), torch.tensor(arrays["tokens"])
    told = torch.tensor(arrays["teacher"])
    return loss_and_gradient(
        lambda x: one._compute_sparse_top_1_divergence_loss(
            x.log_softmax(-1), ids, told, ids, told, labels
        ),
        arrays["logits"],
    )


def sampled(arrays):
    """IWOPDTrainer's policy gradient from teacher's and sampler's log-probs, all weighing 1."""
    one = stub(IWOPDTrainer, temperature=1.0, iw_opd_epsilon=1e-8, iw_opd_gamma=0.0)
    labels, ids = torch.where(torch.tensor(arrays["mask"]), 1, -100), torch.tensor(arrays["tokens"])
    told = torch.tensor(arrays["teacher"]), torch.tensor(arrays["behavior"])
    return loss_and_gradient(
        lambda x: one._compute_iw_opd_loss(x, ids, labels, *told), arrays["logits"]
    )


KINDS = {
    f.__name__: f
    for f in (policy, asynchronous, dpo, kto, reference_free, reward, jsd, chunked_jsd, top, token,
              sampled)
}  # fmt: skip

if __name__ == "__main__":
    files = sys.argv[1:]
    for arrays_file, out_file in zip(files[::2], files[1::2], strict=True):
        arrays = dict(np.load(arrays_file))
        out = {"version": np.array(trl.__version__)}
        for name, (kind, settings) in json.loads(str(arrays.pop("cases"))).items():
            for key, found in KINDS[kind](arrays, **settings).items():
                out[f"{name}/{key}"] = np.asarray(found)
        np.savez(out_file, **out)
