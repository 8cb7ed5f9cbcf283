"""Selection of a run's chat format, for a tokenizer and its model.

data.chat_format   auto       a renderer that is equivalent to the tokenizer's own template,
                              else that template
                   template   the tokenizer's own chat template
                   FILE       a Jinja template of the user
                   NAME       a renderer of the package `renderers`
"""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from jaxrl_async.config.schema import DataSection
from jaxrl_async.data.tokenizer import Tokenizer
from jaxrl_async.errors import ConfigError, DataError
from jaxrl_async.later import Later
from jaxrl_async.ports.rollout import ChatFormat
from jaxrl_async.types import IntArray, Message

if TYPE_CHECKING:
    from jaxrl_async.data.chat_formats import renderer_format, template_format
else:
    renderer_format = Later("jaxrl_async.data.chat_formats.renderer_format")
    template_format = Later("jaxrl_async.data.chat_formats.template_format")

log = logging.getLogger(__name__)

RENDERERS_OF_MODELS: Mapping[str, tuple[str, ...]] = {
    "deepseek_v3": ("deepseek-v3", "deepseek-r1", "kimi-k2"),
    "glm4_moe": ("glm-4.5", "glm-5"),
    "kimi_k2": ("kimi-k2",),
    "llama": ("llama-3",),
    "minimax_m2": ("minimax-m2",),
    "nemotron_h": ("nemotron-3", "nemotron-3-ultra", "nemotron-3.5"),
    "qwen3": ("qwen3", "prime-qwen3"),
    "qwen3_5": ("qwen3.5", "qwen3.6", "qwen3.8"),
    "qwen3_5_moe": ("qwen3.5", "qwen3.6", "qwen3.8"),
    "qwen3_moe": ("qwen3",),
}
"""Renderers to try for a model, by config.json's model_type; the first that matches is used."""
MAX_TEMPLATE_BYTES = 2**20
"""Maximum size of a chat template file, characters."""


class TeachableFormat(ChatFormat, Protocol):
    """A chat format that can also encode target answers for training."""

    def answer(
        self,
        messages: Sequence[Message],
        reply: Message,
        tools: Sequence[Mapping[str, object]] = (),
    ) -> IntArray:
        """Return the tokens of a reply after `opening`, including the end token, [answer] int32.
        Raises DataError if the format does not write it like this."""


def chat_format(
    tokenizer: Tokenizer,
    model: Path | None,
    setting: str = "auto",
    *,
    arguments: Mapping[str, object] | None = None,
    keeps_thinking: bool = False,
) -> TeachableFormat:
    """Choose the chat format of a run, without network access.

    Args:
        tokenizer: of the policy.
        model: its Hugging Face directory, whose config.json names the architecture; None: unknown,
            so `auto` means the tokenizer's own template.
        setting: data.chat_format.
        arguments: data.chat_arguments.
        keeps_thinking: data.keep_thinking.

    Raises:
        ConfigError: there is no such format, or it does not fit the tokenizer or the arguments.
        DataError: the template cannot render a single question.
        MissingExtraError: a renderer is named but the extra [chat] is not installed.
    """
    if setting not in ("auto", "template") and not setting.endswith(".jinja"):
        return _renderer_by_name(tokenizer, setting, arguments, keeps_thinking)
    name = _matching_renderer(tokenizer, model) if setting == "auto" else None
    if name is not None:
        try:
            chosen = renderer_format.RendererFormat(
                tokenizer, name, arguments=arguments, keeps_thinking=keeps_thinking
            )
        except ConfigError as error:
            log.info("using the tokenizer's own chat template: %s", error)
        else:
            log.info("using the renderer %s for chat messages; it matches the chat template", name)
            return chosen
    template = _read_template(setting) if setting.endswith(".jinja") else None
    if template is None and not tokenizer.has_chat_template:
        raise ConfigError(
            "the tokenizer has no chat template, but a task with messages needs one. Set "
            "data.chat_format to a FILE.jinja with one or to a renderer's name, such as qwen3, or "
            "data.tokenizer to the directory of a chat model."
        )
    return template_format.TemplateFormat(
        tokenizer, template=template, arguments=arguments, keeps_thinking=keeps_thinking
    )


def has_chat_format(tokenizer: Tokenizer, setting: str) -> bool:
    """Return True if messages can be encoded, by the setting or the tokenizer's own template."""
    return tokenizer.has_chat_template or setting not in ("auto", "template")


def chat_format_of(data: DataSection, tokenizer: Tokenizer) -> TeachableFormat:
    """Return the chat format of the settings; see chat_format.

    Records need no model directory: the format that `auto` would choose for it writes the same
    openings as the tokenizer's own template.
    """
    return chat_format(
        tokenizer,
        None,
        data.chat_format,
        arguments=data.chat_arguments,
        keeps_thinking=data.keep_thinking,
    )


def _renderer_by_name(
    tokenizer: Tokenizer, name: str, arguments: Mapping[str, object] | None, keeps_thinking: bool
) -> TeachableFormat:
    names = renderer_format.renderer_names()
    if name not in names:
        raise ConfigError(
            f"data.chat_format={name}: there is no such format. Give auto, template, a FILE.jinja, "
            f"or one of {', '.join(names)}."
        )
    return renderer_format.RendererFormat(
        tokenizer, name, arguments=arguments, keeps_thinking=keeps_thinking
    )


def _matching_renderer(tokenizer: Tokenizer, model: Path | None) -> str | None:
    """Return the renderer that matches the tokenizer's own template; None: there is no such
    renderer."""
    candidates = RENDERERS_OF_MODELS.get(_model_type(model), ())
    if not candidates or not tokenizer.has_chat_template:
        return None
    if not renderer_format.is_installed():
        log.info(
            "using the tokenizer's own template for chat messages; the extra [chat] has "
            "renderers for this type of model (%s)",
            ", ".join(candidates),
        )
        return None
    name = next(
        (name for name in candidates if renderer_format.matches_template(tokenizer, name)), None
    )
    if name is None:
        log.info(
            "using the tokenizer's own template for chat messages; none of the renderers %s "
            "matches it",
            ", ".join(candidates),
        )
    return name


def _model_type(model: Path | None) -> str:
    file = None if model is None else model / "config.json"
    if file is None or not file.is_file():
        return ""
    try:
        config = json.loads(file.read_text("utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise DataError(f"{file}: not a JSON object: {error}. Copy the file again.") from None
    return str(config.get("model_type", "")) if isinstance(config, dict) else ""


def _read_template(setting: str) -> str:
    try:
        with Path(setting).open(encoding="utf-8") as file:
            template = file.read(MAX_TEMPLATE_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"data.chat_format={setting}: cannot be read: {error}.") from None
    if len(template) > MAX_TEMPLATE_BYTES or not template.strip():
        raise ConfigError(
            f"data.chat_format={setting}: empty, or longer than {MAX_TEMPLATE_BYTES:,} characters: "
            "not a chat template."
        )
    return template
