"""The state of a simulation as plain arrays, and the names of their columns.

Kernels take these tuples of arrays as they are, so the whole loop can run compiled; nothing in
them is a Python object. Times are float64 µs since the start of the run, sizes int64 bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from oled_sim.costs.tables import CostTables

# Lanes.
GPU, H2D, CPU = 0, 1, 2
LANES = ("gpu", "h2d", "cpu")

# What a policy chooses for an expert: the values of `oled_sim.policy.Lane`.
ON_GPU, BY_TRANSFER, ON_CPU = 0, 1, 2

# What a lane is doing.
IDLE = 0
START = 1  # embedding and dense layers at the start of a pass
DENSE = 2  # norms, attention and gate of a MoE layer
HITS = 3  # grouped kernel over the residents of an event
SHARED = 4  # shared expert
ARRIVALS = 5  # grouped kernel over arrived experts
MERGE = 6  # sum of all parts
HEAD = 7  # LM head and sampling at the end of a pass
DEMAND = 8  # copy of a missed expert
LATE = 9  # prefetch in flight when its expert was needed
PREFETCH = 10  # copy of a prefetched expert
EXPERTS = 11  # CPU workers, with their own link
JOBS = ("idle", "start", "dense", "hits", "shared", "arrivals", "merge", "head",
        "demand", "late", "prefetch", "experts")  # fmt: skip

# `Lanes.time` (float64 [28]): times in µs. Entries with a lane number to add are marked + lane.
NOW = 0
GATE = 1
LEFT = 2  # + lane: what is left of its job, as if the other lanes were idle
BEGAN = 5  # + lane: when its job began
ENDED = 8  # + lane: when its last job ended
BUSY = 11  # + lane: time worked in this pass
CRITICAL = 14  # + lane: its part of the chain that decides the length of this pass
PATH = 17  # + 3 · lane + i: time of lane i in the chain of waiting that ends with lane's last job
SHARED_US = 26  # cost of the event's shared expert
TAKE = 27  # from when on the host can start a prefetch, if the copy engine is idle
LATER = 28  # by how much the next gate comes later, since the host was busy with a prefetch
TIMES = 29

# `Lanes.work` (int64 [64]): the running jobs, the plan of an event, staging slots, and the run.
KIND = 0  # + lane
JOB_LAYER = 3  # + lane
JOB_EXPERT = 6  # + lane: -1 for several
JOB_EXPERTS = 9  # + lane
JOB_TOKENS = 12  # + lane
(
    LAYER,
    TOKENS,  # T, tokens of the event
    EXPERT_BYTES,  # of the layer
    HIT_EXPERTS,
    HIT_TOKENS,
    HITS_DUE,
    SHARED_DUE,
    CPU_EXPERTS,
    CPU_TOKENS,
    CPU_DUE,
    DEMANDS,  # demand transfers of the event
    NEXT_DEMAND,  # the next one to start
    INCOMING,  # demand and late transfers that have not arrived
    READY_EXPERTS,  # arrived, not yet computed
    READY_TOKENS,
    READY_STAGED,  # of these, dropped ones: they hold a staging slot until computed
    RUNNING_STAGED,  # dropped ones in the kernel that runs
    FREE_BYTES,  # free slots of the pool
    FREED_BY_HITS,  # bytes that dropped residents free once computed
    WAITING,  # kept arrivals that wait in staging for one of those
    KEPT,  # transferred experts that are retained
    LATE_KEPT,
    LATE_TOKENS,
) = range(15, 38)
PLAN, PLAN_END = 15, 38
(
    SLOTS,  # staging slots
    USED,
    PEAK,  # the most used during the event
    COPIED_BYTES,  # in this pass
    PREFETCHED,
    PREFETCHED_BYTES,
    FAULT,  # the kind of a job whose cost the profile lacks
    LOGGED,  # rows of the job log
    QUEUED,  # prefetches that wait for the copy engine
    HELD,  # arrived ones that wait for the layer to end
    SEQUENCE,  # of the queue
    PHASE,
    PASS,
    EVENT,
    USES,  # events so far in the run: the recency clock
    GLOBAL,  # 1 if one pool serves all layers
    BUDGET_BYTES,
    POOL_BYTES,  # resident bytes of all layers
    PROBLEM,  # what an error code is about: an expert
    USEFUL,  # prefetches used in this pass
    LATE_COUNT,
    WASTED,
    UNUSED,  # prefetched residents that nothing has used yet
    EQUAL,  # 1 if the policy scores no expert: all are equal, and stay so
    LASTING,  # activated experts that are resident or on their way
    REUSED,  # of the layer's last demand transfers, those retained and activated now
) = range(38, 64)
WORK = 64

# Columns of `Lanes.demand` (int64 [E, 3]).
DEMAND_EXPERT, DEMAND_TOKENS, DEMAND_KEPT = range(3)

# Columns of `Lanes.log` (float64): a job that ended, then what held until then.
LOG_COLUMNS = ("lane", "kind", "layer", "expert", "experts", "tokens", "begin_us", "end_us")
GAUGES = (
    "staging_used",  # staging slots
    "demand_queued",  # demand transfers that wait for the copy engine
    "prefetch_queued",  # prefetches likewise
)

# Phases of a pass.
BEGIN_PASS, STARTING, APPROACHING, AT_GATE, IN_LAYER, LEAVING, MERGING, HEADING = range(8)

# Why the engine stops and asks: decision points, and what a policy did wrong.
DECIDE, ARRIVED, PASS_ENDED, OUTSIDE_PROFILE = 0, 1, 2, 3
NOT_A_LANE, NOT_RESIDENT, IS_RESIDENT, NAN_SCORE, NO_PREFETCH = -1, -2, -3, -4, -5

# Columns of `Course.counts` (int64), one row per event.
EVENT_COUNTS = (
    "activated",  # |A|
    "tokens",  # T
    "hits",  # |R ∩ A|, resident at the gate, wherever computed
    "late",
    "demand",  # demand transfers
    "cpu_misses",
    "cpu_hits",  # residents sent to the CPU
    "kept",  # transferred experts that were retained
    "residents_before",
    "residents_after",
    "capacity",
    "followed",  # demand transfers with a next event of the layer in the request
    "reused",  # of these, retained and activated in it
    "useful",  # prefetched experts used here for the first time
    "promoted",  # queued prefetches that became demand transfers
    "demand_bytes",
    "cpu_bytes",
    "staging_peak",
    "pool_bytes",  # resident bytes of all layers after the event
    "free_bytes",  # free slots of the pool once the lanes have ended
)
(
    N_ACTIVATED, N_TOKENS, N_HITS, N_LATE, N_DEMAND, N_CPU_MISSES, N_CPU_HITS, N_KEPT,
    N_BEFORE, N_AFTER, N_CAPACITY, N_FOLLOWED, N_REUSED, N_USEFUL, N_PROMOTED, N_DEMAND_BYTES,
    N_CPU_BYTES, N_STAGING_PEAK, N_POOL_BYTES, N_FREE_BYTES,
) = range(len(EVENT_COUNTS))  # fmt: skip

# Columns of `Course.times` (float64), one row per event, µs since the start of the run.
EVENT_TIMES = (
    "start_us", "gate_us", "lanes_end_us", "end_us",
    # From start to end: time a lane works, and its part of the chain that decides the length.
    "gpu_busy_us", "h2d_busy_us", "cpu_busy_us",
    "gpu_critical_us", "h2d_critical_us", "cpu_critical_us",
)  # fmt: skip
T_START, T_GATE, T_LANES, T_END, T_BUSY = range(5)
LANE_TIMES = 6  # entries from `BUSY` in `Lanes.time`, and columns from T_BUSY on

# Columns of `Course.pass_counts` (int64) and `Course.pass_times` (float64), one row per pass.
PASS_COUNTS = ("copied_bytes", "prefetched", "prefetched_bytes", "useful", "late", "wasted")
PASS_TIMES = (
    "start_us", "end_us", "gpu_busy_us", "h2d_busy_us", "cpu_busy_us",
    "gpu_critical_us", "h2d_critical_us", "cpu_critical_us",
)  # fmt: skip


class Pools(NamedTuple):
    """Who is resident, and what decides who stays. L layers, E experts.

    Attributes:
        resident: bool [L, E]. here: uint8 [L, E], the same memory, to reckon with.
        score: float64 [L, E], the last score of each expert.
        used: int64 [L, E], recency stamps: larger is more recent, -1 never used; the event's
            number times E plus the rank inside the event.
        order: int64 [L, E], the first ``occupied`` entries are the residents of a layer, the one
            that goes first among equals in front: least recently used, then highest id. Kept only
            where every layer has a pool of its own.
        occupied: int64 [L], residents. capacity: int64 [L], slots (the whole pool's if global).
        expert_bytes: int64 [L].
        fresh: uint8 [L, E], demand-transferred at the layer's last event and resident since.
        fresh_event: int64 [L], row of that event in the batch, -1 none in this request.
        unused: bool [L, E], resident by a prefetch and not used yet.
        window: float64 [L, 4], since the last allocation: events, Σ |A|/E, events with a slot,
            Σ |R ∩ A|/C.
        candidates, ages, sizes: int64 [L·E + 1], keys, levels: float64 [L·E + 1], lost: bool [E],
            scratch of a selection; ``lost`` is false everywhere between selections.
    """

    resident: NDArray[np.bool_]
    here: NDArray[np.uint8]
    score: NDArray[np.float64]
    used: NDArray[np.int64]
    order: NDArray[np.int64]
    occupied: NDArray[np.int64]
    capacity: NDArray[np.int64]
    expert_bytes: NDArray[np.int64]
    fresh: NDArray[np.uint8]
    fresh_event: NDArray[np.int64]
    unused: NDArray[np.bool_]
    window: NDArray[np.float64]
    candidates: NDArray[np.int64]
    ages: NDArray[np.int64]
    sizes: NDArray[np.int64]
    keys: NDArray[np.float64]
    levels: NDArray[np.float64]
    lost: NDArray[np.bool_]


class Lanes(NamedTuple):
    """The three lanes, and every number of a run that is no table.

    Attributes:
        time: float64 [28], work: int64 [64], entries named above.
        demand: int64 [E, 3], the event's demand transfers in order.
        copy_us: float64 [L], copy of one expert. expert_bytes: int64 [L].
        prefetch_us: float64 [L], the same of a prefetch.
        log: float64 [n, 11], jobs that ended, columns ``LOG_COLUMNS`` and ``GAUGES``; n = 0 keeps
            no log.
    """

    time: NDArray[np.float64]
    work: NDArray[np.int64]
    demand: NDArray[np.int64]
    copy_us: NDArray[np.float64]
    prefetch_us: NDArray[np.float64]
    expert_bytes: NDArray[np.int64]
    log: NDArray[np.float64]


class Queue(NamedTuple):
    """Prefetches that wait for the copy engine, and those that wait for a pool.

    Attributes:
        entry: int64 [L·E, 3], layer, expert, sequence number. priority: float64 [L·E].
        place: int32 [L, E], index into ``entry``, -1 not queued.
        held: int64 [staging, 2], arrived (layer, expert) that wait for the running layer to end.
        arrived: int64 [2], the arrival that the engine asks about.
    """

    entry: NDArray[np.int64]
    priority: NDArray[np.float64]
    place: NDArray[np.int32]
    held: NDArray[np.int64]
    arrived: NDArray[np.int64]


class State(NamedTuple):
    """Everything that changes during a run."""

    pools: Pools
    lanes: Lanes
    queue: Queue


class Course(NamedTuple):
    """A batch as kernels see it: what happens, in order, and rows for what was measured.

    V events, P passes, N routing rows. Policy-independent costs are worked out beforehand.

    Attributes:
        event_layer: int64 [V]. event_pass: int64 [V]. pass_event: int64 [P + 1], first event.
        rows: int64 [V], routing rows T of each event.
        offset: int64 [V + 1], where each event's experts start in the next three.
        experts: uint16 [ΣA], activated experts in recency order. tokens: int32 [ΣA].
        dense_us, shared_us, merge_us: float64 [V].
        start_us, head_us: float64 [P].
        counts: int64, times: float64, one row per event. pass_counts: int64, pass_times: float64,
            one row per pass. Columns are named above.
        decode: bool [P], passes that are no prefill.
    """

    event_layer: NDArray[np.int64]
    event_pass: NDArray[np.int64]
    pass_event: NDArray[np.int64]
    rows: NDArray[np.int64]
    offset: NDArray[np.int64]
    experts: NDArray[np.uint16]
    tokens: NDArray[np.int32]
    dense_us: NDArray[np.float64]
    shared_us: NDArray[np.float64]
    merge_us: NDArray[np.float64]
    start_us: NDArray[np.float64]
    head_us: NDArray[np.float64]
    counts: NDArray[np.int64]
    times: NDArray[np.float64]
    pass_counts: NDArray[np.int64]
    pass_times: NDArray[np.float64]
    decode: NDArray[np.bool_]


def new_lanes(
    experts: int,
    copy_us: NDArray[np.float64],
    expert_bytes: NDArray[np.int64],
    staging: int,
    *,
    on_lane_us: float = 0.0,
    log: int = 0,
) -> Lanes:
    """Return idle lanes at time zero.

    ``on_lane_us``: what a prefetch adds to its copy. ``log``: rows of the job log.
    """
    work = np.zeros(WORK, np.int64)
    work[SLOTS] = staging
    return Lanes(
        time=np.zeros(TIMES),
        work=work,
        demand=np.zeros((experts, 3), np.int64),
        copy_us=copy_us,
        prefetch_us=copy_us + on_lane_us,
        expert_bytes=expert_bytes,
        log=np.zeros((log, len(LOG_COLUMNS) + len(GAUGES))),
    )


def new_queue(layers: int, experts: int, staging: int) -> Queue:
    """Return an empty prefetch queue."""
    return Queue(
        entry=np.zeros((layers * experts, 3), np.int64),
        priority=np.zeros(layers * experts),
        place=np.full((layers, experts), -1, np.int32),
        held=np.zeros((max(staging, 1), 2), np.int64),
        arrived=np.zeros(2, np.int64),
    )


def new_pools(
    layers: int, experts: int, capacity: NDArray[np.int64], expert_bytes: NDArray[np.int64]
) -> Pools:
    """Return empty pools."""
    shape = (layers, experts)
    resident = np.zeros(shape, np.bool_)
    return Pools(
        resident=resident,
        here=resident.view(np.uint8),
        score=np.zeros(shape),
        used=np.full(shape, -1, np.int64),
        order=np.zeros(shape, np.int64),
        occupied=np.zeros(layers, np.int64),
        capacity=capacity.copy(),
        expert_bytes=expert_bytes,
        fresh=np.zeros(shape, np.uint8),
        fresh_event=np.full(layers, -1, np.int64),
        unused=np.zeros(shape, np.bool_),
        window=np.zeros((layers, 4)),
        candidates=np.zeros(layers * experts + 1, np.int64),
        ages=np.zeros(layers * experts + 1, np.int64),
        sizes=np.zeros(layers * experts + 1, np.int64),
        keys=np.zeros(layers * experts + 1),
        levels=np.zeros(layers * experts + 1),
        lost=np.zeros(experts, np.bool_),
    )


__all__ = ["CostTables", "Course", "Lanes", "Pools", "Queue", "State"]
