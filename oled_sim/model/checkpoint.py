"""Published LLaDA2 checkpoints: ``config.json`` plus safetensors, read and written as they are.

Read: one file or shards with ``model.safetensors.index.json``; experts stored one by one
(``mlp.experts.7.gate_proj.weight``) or merged (``mlp.experts.gate_proj``, 3-D); ``expert_bias``
in 2 bytes (2.0) or 4 (2.1); names under ``model.language_model.``. Files are memory-mapped and
copied tensor by tensor, so host memory peaks near the size of the model.
"""

from oled_sim.model.checkpoint_layout import INDEX_FILE, SINGLE_FILE, published_tensors
from oled_sim.model.checkpoint_reader import load_checkpoint
from oled_sim.model.checkpoint_writer import SHARD_BYTES, save_checkpoint

__all__ = [
    "INDEX_FILE",
    "SHARD_BYTES",
    "SINGLE_FILE",
    "load_checkpoint",
    "published_tensors",
    "save_checkpoint",
]
