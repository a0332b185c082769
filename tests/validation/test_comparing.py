"""Measured points beside their predictions: what is found, and what is refused."""

import hashlib

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from measured_points import about_of, basis_of, changed, edited, made_trace, simulated_point

from oled_sim.cli.simulating import expert_bytes_of, source_for
from oled_sim.engine.budget import Budget
from oled_sim.engine.rules import Rules
from oled_sim.engine.runner import Contender, simulate_all
from oled_sim.errors import MeasurementError, UsageError
from oled_sim.policy_spec import parse_policy
from oled_sim.trace.schema import Kind
from oled_sim.validation.checks import check_profile, check_trace
from oled_sim.validation.measured import Cut, PolicyUsed
from oled_sim.validation.predicted import policy_of, predict
from oled_sim.validation.report import compare_all, to_plain
from oled_sim.validation.targets import targets_of
from oled_sim.validation.text import facts
from oled_sim.validation.times import regime_of


@pytest.fixture
def validated(trace):
    """Validate points of the trace."""

    def validate(*points, **options):
        return compare_all(points, lambda _, policy: basis_of(trace, policy), **options)

    return validate


def verdicts(report):
    return {target.name: target.met for target in report.targets}


def nth(index, change):
    """Return a change of one entry of a column."""

    def apply(old):
        old[index] = change(old[index])
        return old

    return apply


class TestPrediction:
    def test_is_the_run_of_the_same_requests(self, trace):
        policy = parse_policy("oled")
        about = about_of(trace, "oled", 4, measured=(Cut(request=1), Cut(request=2)))
        basis = basis_of(trace, policy)
        found = predict(about, basis, policy)
        (run,) = simulate_all(
            source_for(trace, [policy]),
            [Contender("oled", policy, Budget(cache=4))],
            basis.costs,
            Rules(history=0, warmup=1),
            expert_bytes=expert_bytes_of(trace, basis.costs),
        )
        decode = found.passes.filter(pa.array(found.passes["kind"].to_numpy() != "prefill"))
        for figures in run.requests:
            mine = decode["pass_us"].to_numpy()[decode["request"].to_numpy() == figures.request]
            assert mine.sum() == pytest.approx(figures.decode_us, rel=1e-12)
            assert found.tokens[figures.request] == figures.output_tokens

    @pytest.mark.parametrize("spec", ["lru", "oled"])
    def test_of_fewer_passes_is_the_beginning_of_that_of_more(self, trace, spec):
        policy = parse_policy(spec)
        basis = basis_of(trace, policy)
        long, short = (
            predict(
                about_of(trace, spec, 4, measured=(Cut(request=1, decode_passes=n),)), basis, policy
            )
            for n in (8, 3)
        )
        assert len(short.passes) == 4 and len(long.passes) == 9
        # Whether a transfer is used again is known only if the layer has another event.
        later = ["followed", "reused"]
        head = long.events.slice(0, len(short.events))
        assert short.events.drop_columns(later).equals(head.drop_columns(later))

    def test_warm_up_and_history_come_first(self, trace):
        policy = parse_policy("lru")
        basis = basis_of(trace, policy)
        warm = predict(about_of(trace, "lru", 4), basis, policy)
        cold = predict(about_of(trace, "lru", 4, warmup=()), basis, policy)
        first = [table["residents_before"].to_numpy()[0] for table in (warm.events, cold.events)]
        assert first[0] == 4 and first[1] == 0

    def test_a_policy_of_other_parameters_is_refused(self, trace):
        about = about_of(trace, "oled", 4)
        parameters = about.policy.parameters | {"psi": "other"}
        used = msgspec.structs.replace(about.policy, parameters=parameters)
        with pytest.raises(
            MeasurementError, match=r"ran with psi=other and would now run with psi="
        ):
            policy_of(msgspec.structs.replace(about, policy=used))

    def test_a_policy_whose_file_has_changed_is_refused(self, trace, tmp_path):
        file = tmp_path / "mine.py"
        file.write_text("from oled_sim.policies.lru import LRU\n\nclass Mine(LRU):\n    pass\n")
        about = about_of(trace, f"{file}", 4)
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        used = msgspec.structs.replace(about.policy, file_sha256=digest)
        noted = msgspec.structs.replace(about, policy=used)
        policy_of(noted)
        file.write_text(file.read_text() + "    learns = False\n")
        policy_of(about)  # of before it was noted
        with pytest.raises(UsageError, match=rf"mine.py' has changed since .*{digest[:12]} in its"):
            policy_of(noted)

    def test_an_unknown_policy_is_refused(self, trace):
        used = PolicyUsed(spec="lrru", label="lrru", parameters={})
        with pytest.raises(MeasurementError, match=r"'lrru' cannot be made again: .*did you mean"):
            policy_of(msgspec.structs.replace(about_of(trace, "lru", 4), policy=used))

    def test_a_request_that_the_trace_lacks(self, trace, lru, validated):
        with pytest.raises(MeasurementError, match="holds no request 77"):
            validated(changed(lru, measured=(Cut(request=77),)))


class TestEqual:
    def test_a_simulated_run_as_if_measured_has_no_error(self, trace, lru, validated):
        others = [simulated_point(trace, s, 4, (1.0, 1.0)) for s in ("oled", "lfu", "moe-infinity")]
        report = validated(lru, *others)
        for comparison in report.comparisons:
            assert comparison.times.error == 0 == comparison.times.spread_us
            assert comparison.times.predicted == comparison.times.measured
            assert comparison.decisions.identical and comparison.decisions.differing == 0
        assert report.errors.median_abs == report.errors.worst_abs == report.errors.mean_abs == 0
        assert report.correlation.linear == pytest.approx(1)
        (ranking,) = report.rankings
        assert ranking.swapped == () and ranking.kendall == pytest.approx(1)
        assert not report.missed

    def test_points_are_in_order_of_cache_and_policy(self, trace, lru, validated):
        points = [simulated_point(trace, s, c) for s, c in (("oled", 10), ("lru", 10), ("oled", 4))]
        found = [c.point.about for c in validated(*points, lru).comparisons]
        order = [(4, "lru"), (4, "oled"), (10, "lru"), (10, "oled")]
        assert [(a.cache, a.policy.label) for a in found] == order


class TestTimes:
    def test_known_factors_give_known_errors(self, trace, validated):
        factors = {2: 0.8, 4: 1.25, 6: 1.0, 8: 1.6, 10: 1.0}
        points = [simulated_point(trace, "lru", c, (f,)) for c, f in factors.items()]
        report = validated(*points)
        # Errors are 1/f - 1: +25 %, -20 %, 0, -37.5 %, 0.
        found = [c.times.error for c in report.comparisons]
        assert found == pytest.approx([0.25, -0.2, 0, -0.375, 0])
        errors = report.errors
        assert errors.median_abs == pytest.approx(0.2) and errors.worst_abs == pytest.approx(0.375)
        assert errors.mean_abs == pytest.approx(0.825 / 5)
        assert errors.signed_mean == pytest.approx(-0.325 / 5)
        assert errors.worst == "lru-c8-gsm-r1"
        assert report.missed == [
            "median |TPOT error|", "worst |TPOT error|", "signed mean TPOT error",
        ]  # fmt: skip

    def test_measured_is_the_median_run_and_spread_the_range(self, trace, validated):
        (found,) = validated(simulated_point(trace, "lru", 4, (1.0, 1.5, 1.1))).comparisons
        times = found.times
        assert times.error == pytest.approx(1 / 1.1 - 1)
        assert times.spread == pytest.approx(0.5 / 1.1)
        assert [t / times.predicted.tpot_us for t in times.repetitions_us] == pytest.approx(
            [1.0, 1.5, 1.1]
        )

    def test_tpot_is_decode_time_over_tokens(self, trace, lru, validated):
        (found,) = validated(lru).comparisons
        request = trace.read(1)
        tokens = int(request.accepted_count[:7].sum())  # prefill and six decode passes
        assert (request.kind[:7] != Kind.PREFILL).sum() == 6
        times = lru.passes["pass_us"].to_numpy()[1:7]
        assert found.times.measured.tpot_us == pytest.approx(times.sum() / tokens)
        assert found.times.output_tokens == tokens and found.times.decode_passes == 6
        expected = np.percentile(times, [10, 50, 90])
        assert found.times.measured.pass_us == pytest.approx(expected)
        prefill = lru.passes["pass_us"].to_numpy()[0]
        assert found.times.measured.prefill_us == pytest.approx(prefill)

    def test_tpot_is_a_mean_over_requests(self, trace, validated):
        cuts = (Cut(request=1), Cut(request=2))
        (both,) = validated(simulated_point(trace, "lru", 4, measured=cuts)).comparisons
        entries = trace.manifest.requests[1:]
        table = both.point.passes
        request, kind = table["request"].to_numpy(), table["kind"].to_numpy()
        time_us = table["pass_us"].to_numpy()
        each = [
            time_us[(request == e.request) & (kind != "prefill")].sum() / e.output_tokens
            for e in entries
        ]
        assert both.times.measured.tpot_us == pytest.approx(np.mean(each))

    def test_lanes_are_compared_where_measured(self, lru, validated):
        slower = edited(
            lru.passes,
            h2d_busy_us=lambda old: 1.25 * old,
            gpu_critical_us=lambda old: np.full_like(old, np.nan),
        )
        lanes = validated(lru._replace(passes=slower)).lanes
        assert lanes["h2d_busy_us"].signed_mean == pytest.approx(-0.2)
        assert lanes["h2d_busy_us"].median_abs == pytest.approx(0.2)
        assert lanes["gpu_busy_us"].worst_abs == pytest.approx(0, abs=1e-12)
        assert lanes["gpu_critical_us"].points == 0
        assert lanes["cpu_busy_us"].points == 0  # lru uses no CPU

    @pytest.mark.parametrize(
        ("gpu", "h2d", "cpu", "regime"),
        [
            (3, 2, 1, "compute-bound"), (2, 3, 1, "transfer-bound"), (1, 2, 3, "CPU-bound"),
            (2, 2, 0, "compute-bound"),
        ],
    )  # fmt: skip
    def test_regimes(self, gpu, h2d, cpu, regime):
        lanes = {"gpu_critical_us": gpu, "h2d_critical_us": h2d, "cpu_critical_us": cpu}
        assert regime_of(lanes) == regime

    def test_decision_time_is_a_mean_over_decode_passes(self, trace, lru, validated):
        slow = edited(lru.passes, decide_us=nth(slice(1, 2), lambda _: 12_100.0))
        report = validated(lru._replace(passes=slow))
        (found,) = report.comparisons
        # Twelve decode passes, eleven of them with 100 µs: 1,100 µs in the mean.
        assert found.times.decide_us == (pytest.approx(1100), 100, 12_100)
        assert report.missed == ["decision time per forward"]
        unknown = edited(lru.passes, decide_us=lambda old: np.full_like(old, np.nan))
        report = validated(lru._replace(passes=unknown))
        assert verdicts(report)["decision time per forward"] is None

    def test_no_token_no_tpot(self, trace, lru, validated):
        found = predict(lru.about, basis_of(trace, parse_policy("lru")), parse_policy("lru"))
        from oled_sim.validation.times import compare_times

        with pytest.raises(MeasurementError, match="request 1 of lru-c4-gsm-r1 puts out no token"):
            compare_times(lru, found._replace(tokens={1: 0}))


class TestDecisions:
    def test_a_swapped_decision_is_named(self, lru, validated):
        events = lru.events
        row = 21 + 3 + 1  # repetition 1 begins at 21; pass 1, second layer
        assert [events[k][row].as_py() for k in ("repetition", "pass_index", "layer")] == [1, 1, 2]
        hits = events["hits"][row].as_py()
        swapped = edited(
            events, hits=nth(row, lambda old: old - 1), demand=nth(row, lambda old: old + 1)
        )
        report = validated(lru._replace(events=swapped))
        (found,) = report.comparisons
        assert found.decisions.first_difference == (
            f"repetition 1, request 1, pass 1, layer 2: hits {hits} predicted, {hits - 1} measured"
        )
        assert (found.decisions.events, found.decisions.differing) == (42, 1)
        assert report.missed == ["decisions, demand-only policies"]

    def test_bytes_of_a_pass_count_too(self, lru, validated):
        passes = edited(lru.passes, copied_bytes=nth(2, lambda old: old + 7))
        (found,) = validated(lru._replace(passes=passes)).comparisons
        assert "repetition 0, request 1, pass 2: copied_bytes" in found.decisions.first_difference
        assert found.decisions.differing == 0 and not found.decisions.identical

    def test_what_depends_on_times_alone_does_not_count(self, lru, validated):
        events = edited(lru.events, staging_peak=nth(0, lambda old: old + 1))
        (found,) = validated(lru._replace(events=events)).comparisons
        assert found.decisions.identical

    @pytest.mark.parametrize(("share", "met"), [(0.99, True), (0.9, False)])
    def test_prefetching_policies_are_compared_in_sum(self, prefetching, validated, share, met):
        point = prefetching
        assert point.passes["prefetched"].to_numpy().sum() > 0
        copied = edited(
            point.passes, copied_bytes=lambda old: (old / share).round().astype(np.int64)
        )
        report = validated(point._replace(passes=copied))
        (found,) = report.comparisons
        assert found.decisions.prefetching and not found.decisions.identical
        assert found.decisions.bytes_error == pytest.approx(share - 1, abs=1e-6)
        assert found.decisions.hits_error == 0
        seen = verdicts(report)
        assert seen["decisions, prefetching policies, free-running"] is met
        assert seen["decisions, demand-only policies"] is None


class TestRankings:
    def test_swapped_policies_are_a_miss(self, trace, validated):
        points = [
            simulated_point(trace, "lru", 4, (1.00, 1.001)),
            simulated_point(trace, "no-cache", 4, (0.5, 0.501)),
        ]
        report = validated(*points)
        (ranking,) = report.rankings
        assert ranking.where == "cache 4, gsm" and ranking.separated == 1
        assert "no-cache is faster than lru on hardware" in ranking.swapped[0]
        assert "ranking" in report.missed

    def test_points_run_once_tell_nothing_unless_a_spread_is_assumed(self, trace, validated):
        points = [simulated_point(trace, spec, 4) for spec in ("lru", "no-cache")]
        report = validated(*points)
        assert report.rankings[0].unknown == 1 and verdicts(report)["ranking"] is None
        report = validated(*points, assumed_spread=0.01)
        assert report.rankings[0].separated == 1 and verdicts(report)["ranking"] is True

    def test_policies_are_compared_over_requests_that_all_have(self, trace, validated):
        first, second = ((Cut(request=r, decode_passes=5),) for r in (1, 2))
        points = [
            simulated_point(trace, "lru", 4, (1.0, 1.1), measured=first),
            simulated_point(trace, "lru", 4, (9.0, 9.9), measured=second),
            simulated_point(trace, "oled", 4, (1.0, 1.2), measured=first),
        ]
        report = validated(*points)
        (ranking,) = report.rankings
        times = {c.policy: c for c in ranking.contests}
        mine = report.comparisons[0].times
        assert times["lru"].measured_us == mine.measured.tpot_us
        assert times["lru"].spread_us == pytest.approx(mine.spread_us)

    def test_traces_of_one_name_are_two_data_sets(self, trace, lru, tmp_path):
        other = made_trace(tmp_path / "gsm", seed=9)
        point = simulated_point(other, "oled", 4)
        traces = {t.manifest.checksum: t for t in (trace, other)}

        def basis_for(point, policy):
            return basis_of(traces[point.about.trace.sha256], policy)

        assert compare_all([lru, point], basis_for).rankings == ()

    def test_one_policy_makes_no_ranking(self, trace, lru, validated):
        report = validated(lru, simulated_point(trace, "oled", 8))
        assert report.rankings == () and verdicts(report)["ranking"] is None


class TestRefusals:
    @pytest.mark.parametrize(
        ("name", "edit", "words"),
        [
            ("passes", lambda t: t.slice(1), "passes.parquet .* lacks a row: .*pass_index 0"),
            ("events", lambda t: t.slice(0, 41), "lacks a row: repetition 1, .* layer 5"),
            ("passes", lambda t: pa.concat_tables([t, t.slice(3, 1)]), "repeats a row: .*_index 3"),
            ("events", lambda t: edited(t, layer=nth(0, lambda _: 7)), "the trace has not: .*r 7"),
            ("passes", lambda t: edited(t, tokens=nth(2, lambda _: 99)), "says tokens 99 and "),
            ("passes", lambda t: edited(t, pass_us=nth(2, lambda _: np.nan)), "no time for a pass"),
            ("passes", lambda t: edited(t, pass_us=nth(2, lambda _: 0.0)), "no time for a pass"),
        ],
    )  # fmt: skip
    def test_damaged_tables(self, lru, validated, name, edit, words):
        with pytest.raises(MeasurementError, match=words):
            validated(lru._replace(**{name: edit(getattr(lru, name))}))

    def test_mixed_kinds_of_machine(self, trace, lru, validated):
        other = simulated_point(trace, "oled", 4)
        hardware = msgspec.structs.replace(other.about.machine.hardware, workers=3)
        machine = msgspec.structs.replace(other.about.machine, hardware=hardware)
        with pytest.raises(MeasurementError, match=r"different kinds of machine \(workers .* 3\)"):
            validated(lru, changed(other, machine=machine))

    def test_machines_of_one_kind_share_a_grid(self, trace, lru, validated):
        other = simulated_point(trace, "oled", 4)
        machine = msgspec.structs.replace(other.about.machine, identity="ffff")
        report = validated(lru, changed(other, machine=machine))
        assert facts(report)["Machine"].endswith("[0123abcd (1 point), ffff (1 point)]")
        plain = to_plain(report)
        assert [(m["identity"], m["points"]) for m in plain["machines"]] == [
            ("0123abcd", 1), ("ffff", 1),
        ]  # fmt: skip
        assert [p["machine"] for p in plain["points"]] == ["0123abcd", "ffff"]

    def test_mixed_geometries(self, trace, lru, validated):
        other = simulated_point(trace, "oled", 4)
        geometry = msgspec.structs.replace(other.about.geometry, name="llada2.0-flash")
        with pytest.raises(MeasurementError, match="of different geometries"):
            validated(lru, changed(other, geometry=geometry))

    def test_mixed_numbers_of_layers(self, trace, lru, validated):
        other = changed(simulated_point(trace, "oled", 4), layers=2)
        with pytest.raises(MeasurementError, match=r"ran different MoE layers \(all and 2\)"):
            validated(lru, other)

    def test_the_same_point_twice(self, lru, validated):
        with pytest.raises(UsageError, match="measure the same point"):
            validated(lru, lru)

    def test_another_profile(self, lru, trace):
        profile = basis_of(trace, parse_policy("lru")).costs.profile
        check_profile(lru, profile)
        with pytest.raises(UsageError, match="is not the one that lru-c4-gsm-r1 was measured"):
            check_profile(
                lru, msgspec.structs.replace(profile, provisional=not profile.provisional)
            )

    def test_another_geometry_than_the_profiles(self, lru, trace):
        profile = basis_of(trace, parse_policy("lru")).costs.profile
        wide = msgspec.structs.replace(lru.about.geometry, name="wide", hidden_size=4096)
        with pytest.raises(MeasurementError, match=r"is of geometry 'llada2.0-mini' and .* 'wide'"):
            check_profile(changed(lru, geometry=wide), profile)

    def test_another_machine_than_the_profiles(self, lru, trace):
        profile = basis_of(trace, parse_policy("lru")).costs.profile
        machine = lru.about.machine
        for field, value in (("gpu", "NVIDIA A100"), ("workers", 3)):
            hardware = msgspec.structs.replace(machine.hardware, **{field: value})
            other = changed(lru, machine=msgspec.structs.replace(machine, hardware=hardware))
            with pytest.raises(MeasurementError, match=f"was measured with {field} {value!r}"):
                check_profile(other, profile)
            check_profile(other, profile, other_hardware=True)

    def test_a_trace_that_has_changed(self, lru, trace):
        check_trace(lru, trace.manifest)
        with pytest.raises(MeasurementError, match="gsm has changed since lru-c4-gsm-r1"):
            check_trace(lru, msgspec.structs.replace(trace.manifest, checksum="1" * 64))


class TestTargets:
    def test_lossless(self, lru, validated):
        report = validated(lru)
        assert verdicts(report)["outputs of layers"] is True
        wrong = msgspec.structs.replace(lru.about.lossless, worst_relative_error=0.03)
        assert validated(changed(lru, lossless=wrong)).missed == ["outputs of layers"]
        assert verdicts(validated(changed(lru, lossless=None)))["outputs of layers"] is None

    @pytest.mark.parametrize(
        ("median", "worst", "signed", "met"),
        [
            (0.05, 0.10, -0.03, [True, True, True]),
            (0.0501, 0.1001, -0.0301, [False, False, False]),
            (0.0501, 0.1001, 0.0301, [False, False, False]),
        ],
    )
    def test_limits_of_errors(self, lru, validated, median, worst, signed, met):
        from dataclasses import replace

        report = validated(lru)
        errors = replace(report.errors, median_abs=median, worst_abs=worst, signed_mean=signed)
        targets = targets_of(report.comparisons, errors, report.rankings)
        assert [t.met for t in targets[:3]] == met
