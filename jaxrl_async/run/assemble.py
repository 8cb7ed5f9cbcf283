"""From a configuration to parts that know nothing of each other. The only file that knows every class."""

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_async.buffer.ledger import Ledger
from jaxrl_async.buffer.replay import ReplayBuffer
from jaxrl_async.config.load import dump
from jaxrl_async.config.schema import Config
from jaxrl_async.data.prompts import eval_prompts, make_prompts, warm_start_pairs
from jaxrl_async.data.tokenizer import load_tokenizer
from jaxrl_async.mesh import NO_TURNS, SAMPLER_RULES, TRAINER_RULES, Turns, make_slices, shardings
from jaxrl_async.metrics.console import Console
from jaxrl_async.metrics.recorder import Recorder
from jaxrl_async.model.decoder import init_params
from jaxrl_async.model.policy import Policy
from jaxrl_async.model.spec import ModelSpec, weight_table
from jaxrl_async.rollout.evaluate import evaluate
from jaxrl_async.rollout.loop import RolloutLoop
from jaxrl_async.run.checkpoint import Checkpoints
from jaxrl_async.run.folder import Paths
from jaxrl_async.run.observe import Counters, Observer, measured_peak_flops
from jaxrl_async.run.signals import Stop
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.scorers.rewards import make_scorer
from jaxrl_async.trainer.advantages import advantage
from jaxrl_async.trainer.pack import pack_pairs
from jaxrl_async.trainer.step import TrainState, TrainStep
from jaxrl_async.trainer.trainer import Outlets, Trainer, probe_tokens
from jaxrl_async.types import EpisodeGroup, SamplingParams
from jaxrl_async.weights.channel import WeightChannel
from jaxrl_async.weights.local import Push
