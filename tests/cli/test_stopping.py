"""What Ctrl-C and SIGTERM leave of a run: finished results, one sentence, no process."""

import os
import signal
import subprocess
import sys
import time

import pandas as pd
import pytest
from commands import oled_sim

from oled_sim.trace import open_trace

EXIT_CODE = {signal.SIGINT: 130, signal.SIGTERM: 143}


@pytest.fixture
def sigterm():
    """SIGTERM as it was before: the command goes on ignoring it, being about to end."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def stopped(arguments, begun, number):
    """Run ``oled-sim``, stop it once it has ``begun``, and return what it said on stderr."""
    process = subprocess.Popen(
        [sys.executable, "-m", "oled_sim", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Whoever runs the tests in the background has it ignored, which children inherit.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 240
    while not begun() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    if number == signal.SIGTERM:
        process.send_signal(number)  # `timeout` sends it to the process, then to all of the group
    os.killpg(process.pid, number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (EXIT_CODE[number], ""), err
    with pytest.raises(ProcessLookupError):  # nobody is left of the group
        for _ in range(50):
            os.killpg(process.pid, 0)
            time.sleep(0.1)
    return err


@pytest.mark.slow
@pytest.mark.parametrize("number", EXIT_CODE)
def test_finished_points_of_several_processes_stay(tmp_path, number):
    arguments = ["reproduce", "--quick", "--jobs", 2, "--out", tmp_path]
    err = stopped(arguments, lambda: list(tmp_path.glob("parts/*.parquet")), number)
    assert "Traceback" not in err and "leaked" not in err
    finished = list(tmp_path.glob("parts/*.parquet"))
    said = err.strip().splitlines()[-1]
    assert said.startswith(f"Error: reproduce stopped: {len(finished)} point")
    assert said.endswith(f" in {tmp_path}; the same command goes on from there")
    assert finished and all(len(pd.read_parquet(part)) for part in finished)


@pytest.mark.slow
@pytest.mark.parametrize("number", EXIT_CODE)
def test_finished_requests_of_several_processes_stay(tmp_path, number):
    out = tmp_path / "t"
    arguments = ["synth", "--coupling", "none", "--requests", 400, "--output-tokens", 256]
    err = stopped(
        [*arguments, "--jobs", 2, "--out", out],
        lambda: len(list(out.glob("routing/*.parquet"))) > 4,
        number,
    )
    trace = open_trace(out)
    assert 0 < len(trace) < 400
    kept = f"{len(trace)} of 400 requests are in {out}, all readable"
    assert err.strip() == f"Error: synth stopped: {kept}"
    assert all(request.passes for request in trace)  # read with their checksums


@pytest.mark.parametrize("number", EXIT_CODE)
def test_exit_codes_tell_signals_apart(monkeypatch, sigterm, number):
    def stop(_):
        os.kill(os.getpid(), number)
        time.sleep(60)  # the signal ends it

    monkeypatch.setattr("oled_sim.trace.open_trace", stop)
    ended = oled_sim("run", "--policy", "lru", "--cache", 4)
    assert ended.returncode == EXIT_CODE[number]
    assert ended.stderr.strip() == "Error: run stopped: what was not finished is left out"


def test_a_sweep_says_that_it_keeps_nothing_and_what_does(monkeypatch, sigterm, tmp_path):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("oled_sim.cli.grids.sweep", stop)
    out = tmp_path / "sweep.csv"
    ended = oled_sim("sweep", "nano-gsm8k", "--policy", "lru", "--cache", 4, "--out", out)
    assert ended.returncode == 130 and not list(tmp_path.iterdir())
    said = "nothing is kept, all combinations finish together; as an experiment of your own"
    assert f"Error: sweep stopped: {said} (docs/experiments.md) the grid goes on" in ended.stderr


def test_a_second_sigterm_does_not_disturb_the_cleanup(monkeypatch, sigterm):
    cleaned = []

    def stop(_):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            cleaned.append(True)

    monkeypatch.setattr("oled_sim.trace.open_trace", stop)
    assert oled_sim("run", "--policy", "lru", "--cache", 4).returncode == 143
    assert cleaned


def test_a_sigterm_that_was_swallowed_can_be_sent_again(monkeypatch, sigterm):
    monkeypatch.setattr("oled_sim.cli.stopping.REPEATED_S", 0.0)
    swallowed = []

    def stop(_):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        except:  # noqa: E722 - as code of others does
            swallowed.append(True)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    monkeypatch.setattr("oled_sim.trace.open_trace", stop)
    assert oled_sim("run", "--policy", "lru", "--cache", 4).returncode == 143
    assert swallowed


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda number, frame: None])
def test_who_handles_sigterm_goes_on_doing_so(monkeypatch, sigterm, handler):
    signal.signal(signal.SIGTERM, handler)
    kept = []

    def look(_):
        kept.append(signal.getsignal(signal.SIGTERM))
        raise ZeroDivisionError

    monkeypatch.setattr("oled_sim.trace.open_trace", look)
    with pytest.raises(ZeroDivisionError):
        oled_sim("run", "--policy", "lru", "--cache", 4)
    assert kept == [handler] and signal.getsignal(signal.SIGTERM) is handler


def test_signals_mean_what_they_did_after_a_command(sigterm):
    before = signal.getsignal(signal.SIGINT)
    assert oled_sim("run", "--policy", "none-such", "--cache", 4).returncode == 2
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is before


def ran(*arguments):
    """Run Python, with Ctrl-C handled as usual."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=240,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


ENDING = """
import atexit, sys
from oled_sim.cli.main import main

def take_a_while():
    print("ending", file=sys.stderr, flush=True)
    sys.stdin.read()

atexit.register(take_a_while)
main()
"""
"""The command, whose interpreter says when it ends, and goes on to once stdin is closed."""


@pytest.mark.parametrize(("name", "code"), [("lru", 0), ("no-such", 2)])
def test_sigterm_once_a_command_has_ended_leaves_its_exit_code(name, code):
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen([sys.executable, "-c", ENDING, "policies", name], **pipes)
    while (line := process.stderr.readline()) != b"ending\n":
        assert line, "it ended before its end"
    process.terminate()
    out, _ = process.communicate(timeout=60)
    assert process.returncode == code and bool(out) == (code == 0)


def test_sigterm_before_the_output_is_flushed_changes_nothing_any_more(monkeypatch, sigterm):
    monkeypatch.setattr(
        "oled_sim.cli.main.flush_stdout", lambda: os.kill(os.getpid(), signal.SIGTERM)
    )
    ended = oled_sim("policies", "lru")
    assert (ended.returncode, ended.stderr) == (0, "") and ended.stdout.startswith("lru")


def test_sigterm_while_an_error_is_said_is_no_traceback(monkeypatch, sigterm):
    def stop():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)  # the signal ends it

    monkeypatch.setattr("oled_sim.cli.main.as_far_as_taken", stop)
    assert oled_sim("policies", "no-such").returncode == 143


@pytest.mark.parametrize("number", EXIT_CODE)
def test_a_stop_in_code_made_from_text_has_its_exit_code(tmp_path, number):
    """As in dataclasses: CPython remembers a KeyboardInterrupt that has left such code."""
    policy = f"import os, time; os.kill(os.getpid(), {number:d}); time.sleep(60)"
    (tmp_path / "made.py").write_text(f"exec({policy!r})")
    ended = ran("-m", "oled_sim", "policies", tmp_path / "made.py")
    assert ended.returncode == EXIT_CODE[number], ended.stderr
    assert ended.stderr.startswith("Error: policies stopped: ")


def test_a_stop_before_the_command_is_known_names_the_program(monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("oled_sim.cli.main.LazyGroup.resolve_command", stop)
    assert oled_sim("policies").stderr.startswith("Error: oled-sim stopped: ")


STARTING = """
import os, signal
from multiprocessing import util
from oled_sim.cli.main import main

start = util.spawnv_passfds

def start_and_send(path, arguments, files):
    pid = start(path, arguments, files)
    if any("spawn_main" in str(argument) for argument in arguments):
        SEND
    return pid

util.spawnv_passfds = start_and_send
main()
"""
"""The command, where signals are sent as soon as a process of ``--jobs`` has been started."""


def synth_where(send, out):
    code = STARTING.replace("SEND", send)
    arguments = ["synth", "--coupling", "none", "--requests", 4, "--output-tokens", 32]
    return ran("-c", code, *arguments, "--jobs", 2, "--out", out)


@pytest.mark.parametrize("number", EXIT_CODE)
def test_a_stop_while_a_process_is_started_leaves_it_nothing_to_say(tmp_path, number):
    """It has not been told what to do yet, and would complain of that."""
    ended = synth_where(f"os.kill(os.getpid(), {number:d})", tmp_path / "t")
    # Whoever holds stderr is waited for, the process that was started, too.
    assert "Traceback" not in ended.stderr
    assert ended.stderr.endswith("Error: synth stopped: nothing was recorded\n")
    assert ended.returncode == EXIT_CODE[number]


def test_a_process_that_was_killed_is_a_sentence(tmp_path):
    ended = synth_where("os.kill(pid, signal.SIGKILL)", tmp_path / "t")
    assert ended.returncode == 1 and "Traceback" not in ended.stderr
    said = "Error: a process of --jobs was killed, mostly for want of memory: use fewer --jobs; "
    assert ended.stderr.splitlines()[-1].startswith(said)


def test_processes_leave_stopping_to_the_first_from_their_birth_on(tmp_path):
    send = "os.kill(pid, signal.SIGINT); os.kill(pid, signal.SIGTERM)"
    ended = synth_where(send, tmp_path / "t")
    assert ended.returncode == 0 and "Traceback" not in ended.stderr, ended.stderr
    assert len(open_trace(tmp_path / "t")) == 4
