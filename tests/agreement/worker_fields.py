"""The fields of a library's configurations, and of a GRPOConfig what from_trl makes of it, as JSON.
Run with the library's own interpreter:

    worker_fields.py trl|tunix REPOSITORY OUT.json
"""

import dataclasses
import importlib
import json
import sys
import tempfile

CLASSES = {
    "trl": (
        "trl:GRPOConfig",
        "trl:ModelConfig",
        "trl.scripts.grpo:GRPOScriptArguments",
    ),
    "tunix": (
        "tunix.rl.grpo.grpo_learner:GRPOConfig",
        "tunix.rl.grpo.dapo_learner:DAPOConfig",
        "tunix.rl.rl_cluster:RLTrainingConfig",
        "tunix.rl.rollout.base_rollout:RolloutConfig",
    ),
}


def fields_of(name):
    """Name and default of each field of a dataclass."""
    module, _, attribute = name.partition(":")
    found = {}
    for one in dataclasses.fields(getattr(importlib.import_module(module), attribute)):
        default = None if one.default is dataclasses.MISSING else one.default
        if one.default_factory is not dataclasses.MISSING:
            default = one.default_factory()
        found[one.name] = getattr(default, "value", default)
    return found


def converted(repository):
    """What from_trl makes of some objects of TRL's and PEFT's."""
    sys.path.insert(0, repository)
    from peft import LoraConfig
    from trl import GRPOConfig

    import jaxrl_async

    shared = {"output_dir": tempfile.mkdtemp() + "/mine", "use_cpu": True, "bf16": False}
    small = {"num_generations": 2, "per_device_train_batch_size": 4, "num_iterations": 2}
    more = {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "max_steps": 100}
    adapter = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"])
    plain = jaxrl_async.from_trl(GRPOConfig(**shared, max_steps=10))
    whole = jaxrl_async.from_trl(GRPOConfig(**shared, **small, **more), peft_config=adapter)
    return {"plain": plain["config"], "whole": whole["config"]}


def main(library, repository, out):
    told = {"fields": {name: fields_of(name) for name in CLASSES[library]}}
    if library == "trl":
        told["converted"] = converted(repository)
    with open(out, "w", encoding="utf-8") as file:
        json.dump(told, file, default=str)


if __name__ == "__main__":
    main(*sys.argv[1:])
