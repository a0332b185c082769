"""Points as replay would write them, made of simulated runs, so that what is in them is known."""

import datetime

import msgspec
import numpy as np
import pyarrow as pa

from oled_sim.cli.simulating import costs_for, source_for
from oled_sim.costs.profile import Software
from oled_sim.geometry import RoutingGeometry
from oled_sim.policy_spec import parse_policy
from oled_sim.testing.traces import random_request, write_trace
from oled_sim.validation.measured import (
    About,
    Cut,
    Lossless,
    Machine,
    Point,
    PolicyUsed,
    ProfileUsed,
    TraceUsed,
    point_name,
    profile_sha256,
    write_point,
)
from oled_sim.validation.predicted import Basis, predict

GEOMETRY = RoutingGeometry((1, 2, 5), 16, 2)


def made_trace(folder, seed=0, requests=3):
    """Write a small trace and open it."""
    rng = np.random.default_rng(seed)
    made = [random_request(rng, GEOMETRY, request=i, passes=9 + i) for i in range(requests)]
    return write_trace(folder, made, GEOMETRY)


def basis_of(trace, policy, profile=None):
    return Basis(source_for(trace, [policy]), costs_for(trace, None, profile, False))


def about_of(trace, spec, cache, **changes):
    """Return what a point says that ran ``spec`` on this trace, request 0 being the warm-up."""
    policy = parse_policy(spec)
    profile = basis_of(trace, policy).costs.profile
    fields = {
        "policy": PolicyUsed(spec=spec, label=spec, parameters=dict(policy.describe())),
        "cache": cache,
        "geometry": profile.geometry,
        "trace": TraceUsed(name=str(trace.path), sha256=trace.manifest.checksum),
        "warmup": (Cut(request=0),),
        "measured": (Cut(request=1, decode_passes=6),),
        "repetitions": 1,
        "profile": ProfileUsed(name=profile.name, sha256=profile_sha256(profile)),
        "machine": Machine(identity="0123abcd", hardware=profile.hardware),
        "software": Software(os="Linux", python="3.11", torch="2.9", cuda="13.0", numpy="2.4"),
        "lossless": Lossless(events_checked=9, worst_relative_error=1e-3, tolerance=2e-2),
        "date": datetime.date(2026, 11, 30),
    }
    return About(**(fields | changes))


def simulated_point(trace, spec, cache, factors=(1.0,), decide_us=100.0, **changes):
    """Return a simulated run as if measured; repetition i takes ``factors[i]`` times as long."""
    about = about_of(trace, spec, cache, repetitions=len(factors), **changes)
    policy = parse_policy(spec)
    found = predict(about, basis_of(trace, policy), policy)
    passes = [
        edited(
            found.passes,
            repetition=lambda old, i=i: np.full_like(old, i),
            pass_us=lambda old, f=f: old * f,
            decide_us=lambda old: np.full_like(old, decide_us),
            paused_us=np.zeros_like,
        )
        for i, f in enumerate(factors)
    ]
    events = [
        edited(found.events, repetition=lambda old, i=i: np.full_like(old, i))
        for i in range(len(factors))
    ]
    return Point(about, pa.concat_tables(passes), pa.concat_tables(events))


def edited(table, **changes):
    """Return a table with columns changed by functions of the old ones (as numpy arrays)."""
    for name, change in changes.items():
        i = table.schema.get_field_index(name)
        new = pa.array(change(table[name].to_numpy().copy()))
        table = table.set_column(i, name, new)
    return table


def changed(point, **fields):
    """Return a point that says something else."""
    return point._replace(about=msgspec.structs.replace(point.about, **fields))


def save(root, *points):
    """Write points into a folder under their names."""
    root.mkdir(exist_ok=True)
    for point in points:
        write_point(root / point_name(point.about), point)
    return root
