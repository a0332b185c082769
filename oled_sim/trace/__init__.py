"""Traces: on-disk format v1, reader, writer, validator and statistics."""

from oled_sim.trace.builder import LayerRoutes, RequestBuilder
from oled_sim.trace.manifest import (
    Decode,
    FileEntry,
    Manifest,
    Model,
    Prompts,
    RequestEntry,
    Runtime,
)
from oled_sim.trace.reader import Trace, bundled_traces, open_trace
from oled_sim.trace.schema import Kind, RequestTrace, TokenState
from oled_sim.trace.writer import OpenRequest, TraceWriter

__all__ = [
    "Decode",
    "FileEntry",
    "Kind",
    "LayerRoutes",
    "Manifest",
    "Model",
    "OpenRequest",
    "Prompts",
    "RequestBuilder",
    "RequestEntry",
    "RequestTrace",
    "Runtime",
    "TokenState",
    "Trace",
    "TraceWriter",
    "bundled_traces",
    "open_trace",
]
