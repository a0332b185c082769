"""`import` and `export`: a subcommand per plug-in, which takes its own options alone."""

import subprocess
import sys

import pytest
from click.testing import CliRunner

from oled_sim.cli.main import cli
from oled_sim.cli.share_progress import share_progress
from oled_sim.errors import UsageError
from oled_sim.plugin_options import PluginOption, number, options_of, takes

TABLE = "token,layer,expert_0,expert_1\n" + "".join(
    f"{token},{layer},{1 + token % 4},{5 + token % 3}\n" for token in range(20) for layer in (1, 2)
)


def call(*arguments):
    return CliRunner().invoke(cli, list(map(str, arguments)))


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "routes.csv"
    path.write_text(TABLE)
    return path


def test_formats_are_listed_without_loading_them():
    script = (
        "import sys; from oled_sim.cli.main import main\n"
        "try: main(['import', '--help'])\n"
        "finally: print(sorted({'numpy', 'pyarrow', 'numba'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "csv, route-csv, route-jsonl, routed-experts" in " ".join(done.stdout.split())
    assert done.stdout.endswith("[]\n")


def test_help_of_a_format_lists_its_own_options():
    assert "--columns" in call("import", "csv", "--help").output
    assert "--columns" not in call("import", "route-csv", "--help").output
    assert "--first-layer" in call("import", "routed-experts", "--help").output
    assert "--sizes" in call("export", "oracle-general", "--help").output


def test_an_option_of_another_format_is_refused(tmp_path, table):
    refusal = call("import", "route-jsonl", table, "--out", tmp_path / "t", "--columns", "a=b")
    assert isinstance(refusal.exception, UsageError)
    assert str(refusal.exception).startswith(
        "the format route-jsonl takes no --columns: it takes --out, --prompt-tokens, --experts"
    )


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--as-blocks", "1", "--as-blocks is '1': give a whole number from 2 on"),
        ("--experts", "many", "--experts is 'many': give a whole number from 1 on"),
        ("--columns", "token", "--columns holds 'token': give pairs"),
    ],
)
def test_values_that_are_none_are_refused_before_anything_is_read(table, option, value, message):
    refusal = call("import", "csv", table, "--out", table.parent / "t", option, value)
    assert isinstance(refusal.exception, UsageError)
    assert message in str(refusal.exception)
    assert not (table.parent / "t").exists()


def test_there_and_back(tmp_path, table):
    """A table in, blocks of 16, arrays out and in again: the same files."""
    first = call(
        "import", "csv", table, "--out", tmp_path / "a", "--experts", 8, "--prompt-tokens", 4
    )
    assert "(2 MoE layers, 8 experts, top-2): 4 prompt and 16 output tokens, 17 passes" in (
        first.output
    )
    cut = call("trace", "reblock", tmp_path / "a", "--as-blocks", 8, "--out", tmp_path / "b")
    assert "1 request in 4 passes" in cut.output  # prompt, 4 to 7, 8 to 15, 16 to 19
    assert call("export", "npz", tmp_path / "b", "--out", tmp_path / "b.npz").exit_code == 0
    again = call("import", "routed-experts", tmp_path / "b.npz", "--out", tmp_path / "c")
    assert again.exit_code == 0
    straight = call(
        "import", "csv", table, "--out", tmp_path / "d", "--experts", 8, "--prompt-tokens", 4,
        "--as-blocks", 8,
    )  # fmt: skip
    assert straight.exit_code == 0
    for name in ("iterations", "tokens", "routing"):
        files = [tmp_path / folder / name / "00000.parquet" for folder in "bcd"]
        assert len({file.read_bytes() for file in files}) == 1


def test_a_trace_that_is_not_autoregressive_is_not_cut(tmp_path):
    refusal = call("trace", "reblock", "nano-gsm8k", "--as-blocks", 4, "--out", tmp_path / "b")
    assert isinstance(refusal.exception, UsageError)
    assert "only autoregressive recordings can be cut into blocks" in str(refusal.exception)
    assert not (tmp_path / "b").exists()


def test_a_plug_in_declares_what_it_takes():
    @takes(PluginOption("--how-many", "N", "A number.", number("--how-many", 3)))
    def plugin(how_many=None):
        return how_many

    (option,) = options_of(plugin)
    assert option.keyword == "how_many"
    assert option.parse(" 3 ") == 3
    with pytest.raises(UsageError, match="from 3 on"):
        option.parse("2")
    assert options_of(print) == ()


def test_an_exporter_of_ones_own_is_loaded_from_its_file(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from oled_sim.plugin_options import PluginOption, takes\n"
        "@takes(PluginOption('--greeting', 'TEXT', 'What to say.'))\n"
        "def hello(trace, file, *, greeting='hi', on_progress=None, on_note=None):\n"
        "    file.write(f'{greeting} {len(trace)}'.encode())\n"
        "    return {'words': 2}\n"
    )
    form, out = f"{tmp_path / 'mine.py'}:hello", tmp_path / "out.txt"
    done = call("export", form, "nano-gsm8k", "--out", out, "--greeting", "hey", "--requests", 3)
    assert "exported 3 requests, 2 words of nano-gsm8k" in done.output
    assert out.read_text() == "hey 3"


def test_progress_says_nothing_of_short_work_and_a_line_now_and_then_of_long(capsys):
    now = [0.0]
    with share_progress("Importing x", clock=lambda: now[0]) as show:
        for second, share in ((1, 0.1), (9, 0.4), (11, 0.5), (15, 0.6), (22, 0.9), (40, 1.0)):
            now[0] = second
            show(share)
    assert capsys.readouterr().err == "Importing x: 50 %\nImporting x: 90 %\n"


@pytest.mark.parametrize("before", [True, False])
def test_ctrl_c_leaves_what_was_there(tmp_path, table, monkeypatch, before):
    """The old trace, or nothing, so that the same command runs afterwards."""
    out = tmp_path / "new" / "t"
    command = ["import", "csv", table, "--out", out, "--experts", 8]
    if before:
        assert call(*command).exit_code == 0
        command.append("--overwrite")
    kept = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("oled_sim.trace.writer.encode_table", interrupted)
        stopped = call(*command)
    as_it_was = f", the trace {out} is as it was" if before else ""
    said = str(stopped.exception)
    assert said == f"import csv stopped: nothing of {table} was imported{as_it_was}"
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == kept
    assert (tmp_path / "new").exists() == before
    assert call(*command).exit_code == 0


@pytest.mark.parametrize(
    ("option", "value"),
    [("--as-blocks", "99999999999"), ("--as-blocks", "9" * 5000), ("--experts", "99999999")],
)
def test_numbers_beyond_the_format_are_refused(tmp_path, table, option, value):
    refusal = call("import", "csv", table, "--out", tmp_path / "t", option, value)
    assert isinstance(refusal.exception, UsageError)
    most = {"--as-blocks": 2147483647, "--experts": 65536}[option]
    assert str(refusal.exception) == f"{option} is {value!r}: give at most {most}"


def test_blocks_beyond_the_format_are_refused(tmp_path):
    refusal = call("trace", "reblock", "nano-gsm8k", "--as-blocks", 99999999999, "--out", tmp_path)
    assert refusal.exit_code == 2
    assert "2<=x<=2147483647" in refusal.output


def test_an_export_does_not_go_into_its_own_trace(tmp_path, table):
    call("import", "csv", table, "--out", tmp_path / "t", "--experts", 8)
    manifest = (tmp_path / "t" / "manifest.json").read_bytes()
    for name in ("manifest.json", "tokens/00000.parquet", "x.csv"):
        out = tmp_path / "t" / name
        refusal = call("export", "csv", tmp_path / "t", "--out", out, "--overwrite")
        assert isinstance(refusal.exception, UsageError)
        assert "is inside the trace" in str(refusal.exception)
    assert (tmp_path / "t" / "manifest.json").read_bytes() == manifest
    assert not (tmp_path / "t" / "x.csv").exists()
