"""mini-swe-agent: a shell as the only tool."""

import os

from drive import drive

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
os.environ["MSWEA_SILENT_STARTUP"] = "1"


def bash(config="mini.yaml", kind="litellm"):
    import tempfile

    import yaml
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.config import builtin_config_dir
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models import get_model

    settings = yaml.safe_load((builtin_config_dir / config).read_text())
    usual = settings.get("model", {})
    model = get_model(
        "openai/" + os.environ["JAXRL_MODEL"],
        {**usual, "model_class": kind, "cost_tracking": "ignore_errors"},
    )
    names = ("system_template", "instance_template", "step_limit", "cost_limit")
    agent = DefaultAgent(
        model,
        LocalEnvironment(cwd=tempfile.mkdtemp()),
        **{k: v for k, v in settings["agent"].items() if k in names},
    )
    result = agent.run("Print the price of milk.")
    return [result["exit_status"], result["submission"]]


def text_based():
    return bash("mini_textbased.yaml", "litellm_textbased")


MODES = {f.__name__: f for f in (bash, text_based)}
if __name__ == "__main__":
    drive("mini-swe-agent", MODES)
