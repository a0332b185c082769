"""The configuration of a LLaDA2 model: ``config.json`` of a published checkpoint, strictly read.

Field names are those of the Hugging Face configuration. Every field that decides a shape or a
number must be present: the published configuration class has defaults that belong to no
published model (vocabulary 30592, 16 experts), so a missing field is an error, never a default.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from oled_sim.errors import CheckpointError
from oled_sim.geometry import RoutingGeometry

CONFIG_FILE = "config.json"
MODEL_TYPES = ("llada2_moe", "llada2_moe_veomni")

FIXED = {
    "attention_dropout": 0.0,
    "embedding_dropout": 0.0,
    "expert_capacity": None,  # LLaDA2.2's block routing
    "hidden_act": "silu",
    "moe_router_enable_expert_bias": True,
    "norm_head": False,
    "norm_softmax": False,
    "output_dropout": 0.0,
    "rope_scaling": None,
    "router_dtype": "fp32",
    "score_function": "sigmoid",
    "use_bias": False,
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "use_rmsnorm": True,
    "use_sliding_window": False,
    "using_split_qkv_in_self_attention": False,
}
"""Settings that the architecture implemented here fixes: present with another value, refused."""

_POSITIVE = (
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "moe_intermediate_size",
    "num_experts",
    "num_experts_per_tok",
    "num_shared_experts",
    "n_group",
    "topk_group",
    "routed_scaling_factor",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rope_theta",
    "rms_norm_eps",
    "vocab_size",
    "max_position_embeddings",
)


class LLaDA2Config(msgspec.Struct, frozen=True, kw_only=True):
    """Shapes and constants of one LLaDA2 model.

    Attributes:
        first_k_dense_replace: number of leading layers with a dense MLP instead of experts.
        intermediate_size: inner width of the dense MLP.
        moe_intermediate_size: inner width of one routed expert.
        num_shared_experts: the shared expert is one MLP, this many experts wide.
        n_group, topk_group: experts form ``n_group`` groups; a token may use ``topk_group``.
        routed_scaling_factor: factor on the renormalised weights of the chosen experts.
        partial_rotary_factor: share of each head's dimensions that rotary embedding turns.
        initializer_range: standard deviation of initial weights (training only).
        mask_token_id: absent from published files; the published tokenizer's value by default.

    Raises:
        CheckpointError: a value no model can have, or values that contradict each other.
    """

    hidden_size: int
    num_hidden_layers: int
    first_k_dense_replace: int
    intermediate_size: int
    moe_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    num_shared_experts: int
    n_group: int
    topk_group: int
    routed_scaling_factor: float
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    partial_rotary_factor: float
    rope_theta: float
    rms_norm_eps: float
    vocab_size: int
    tie_word_embeddings: bool
    max_position_embeddings: int
    initializer_range: float = 0.02
    mask_token_id: int = 156895
    eos_token_id: int = 156892
    pad_token_id: int = 156892

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            _require(getattr(self, name) > 0, f"{name} is {getattr(self, name)}, not positive")
        self._check_layers_and_heads()
        self._check_experts()
        for name in ("mask_token_id", "eos_token_id", "pad_token_id"):
            self._check_token(name)

    def _check_layers_and_heads(self) -> None:
        _require(
            0 <= self.first_k_dense_replace < self.num_hidden_layers,
            f"first_k_dense_replace {self.first_k_dense_replace} leaves no expert layer among "
            f"num_hidden_layers {self.num_hidden_layers}",
        )
        _require(
            self.num_attention_heads % self.num_key_value_heads == 0,
            f"num_attention_heads {self.num_attention_heads} is no multiple of "
            f"num_key_value_heads {self.num_key_value_heads}",
        )
        _require(
            0 < self.rotary_dim <= self.head_dim and self.rotary_dim % 2 == 0,
            f"partial_rotary_factor {self.partial_rotary_factor} turns {self.rotary_dim} of "
            f"{self.head_dim} dimensions, which must be an even number of them",
        )

    def _check_experts(self) -> None:
        _require(
            self.num_experts % self.n_group == 0 and self.num_experts >= 2 * self.n_group,
            f"num_experts {self.num_experts} does not form n_group {self.n_group} equal groups "
            "of at least two",
        )
        _require(
            self.topk_group <= self.n_group,
            f"topk_group {self.topk_group} exceeds n_group {self.n_group}",
        )
        reachable = self.topk_group * (self.num_experts // self.n_group)
        _require(
            self.num_experts_per_tok <= reachable,
            f"num_experts_per_tok {self.num_experts_per_tok} exceeds the {reachable} experts of "
            f"topk_group {self.topk_group} groups",
        )

    def _check_token(self, name: str) -> None:
        value = getattr(self, name)
        _require(
            0 <= value < self.vocab_size,
            f"{name} {value} lies outside the vocabulary of {self.vocab_size}: set {name}",
        )

    @property
    def rotary_dim(self) -> int:
        """Dimensions of each head that rotary embedding turns."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers that hold routed experts, ascending."""
        return tuple(range(self.first_k_dense_replace, self.num_hidden_layers))

    @property
    def routing_geometry(self) -> RoutingGeometry:
        """What a trace of this model routes over."""
        return RoutingGeometry(self.moe_layers, self.num_experts, self.num_experts_per_tok)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> LLaDA2Config:
        """Read the content of a ``config.json``.

        Raises:
            CheckpointError: a field is missing, of the wrong type, or asks for what the
                architecture implemented here does not do.
        """
        _check_supported(raw)
        try:
            config = msgspec.convert(dict(raw), cls)
        except msgspec.ValidationError as error:
            raise CheckpointError(_sentence(error)) from None
        _require(
            raw.get("rotary_dim", config.rotary_dim) == config.rotary_dim,
            f"rotary_dim {raw.get('rotary_dim')} contradicts partial_rotary_factor "
            f"{config.partial_rotary_factor} of head_dim {config.head_dim}",
        )
        return config

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> LLaDA2Config:
        """Read ``config.json``, or the one in the folder ``path``.

        Raises:
            CheckpointError: as :meth:`from_dict`, naming the file.
        """
        file = Path(path)
        file = file if file.suffix == ".json" else file / CONFIG_FILE
        try:
            raw = msgspec.json.decode(file.read_bytes())
            if not isinstance(raw, dict):
                raise CheckpointError("it does not hold a JSON object")
            return cls.from_dict(raw)
        except OSError as error:
            raise CheckpointError(f"cannot read {file}: {error.strerror}") from None
        except msgspec.DecodeError as error:
            raise CheckpointError(f"{file} is not valid JSON: {error}") from None
        except CheckpointError as error:
            raise CheckpointError(f"{file}: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as published files write them, fixed settings included."""
        fixed = {name: value for name, value in FIXED.items() if name != "expert_capacity"}
        head = {"architectures": ["LLaDA2MoeModelLM"], "model_type": MODEL_TYPES[0]}
        more = {"dtype": "bfloat16", "norm_topk_prob": True, "rotary_dim": self.rotary_dim}
        body = fixed | more | msgspec.structs.asdict(self)
        return head | dict(sorted(body.items()))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write ``config.json`` (into the folder ``path``, if it is one), atomically.

        Raises:
            CheckpointError: the file cannot be written.
        """
        file = Path(path)
        file = file / CONFIG_FILE if file.is_dir() else file
        text = msgspec.json.format(msgspec.json.encode(self.to_dict()), indent=2) + b"\n"
        temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("wb") as out:
                out.write(text)
                out.flush()
                os.fsync(out.fileno())
            temporary.replace(file)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise CheckpointError(f"cannot write {file}: {error.strerror}") from None


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise CheckpointError(otherwise)


def _check_supported(raw: Mapping[str, Any]) -> None:
    kind = raw.get("model_type")
    _require(
        kind in MODEL_TYPES,
        f"model_type {kind!r} is not a LLaDA2 mixture of experts ({' or '.join(MODEL_TYPES)})",
    )
    for name, value in FIXED.items():
        _require(
            raw.get(name, value) == value,
            f"{name} {raw.get(name)!r} is not supported, only {value!r} is",
        )


def _sentence(error: msgspec.ValidationError) -> str:
    """Turn msgspec's message into ours: ``Object missing required field `x```."""
    return str(error).replace("Object missing", "it lacks the").replace("the required", "the")
