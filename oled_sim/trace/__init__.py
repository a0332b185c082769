"""Traces: on-disk format v1, reader, writer, validator and statistics."""
