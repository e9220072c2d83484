"""Runs that are asked to stop: Ctrl-C, SIGTERM, SIGHUP; saved after the step at hand and exact to continue."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from rankgrad.lab import cli, recipes
from rankgrad.lab.cli import main
from rankgrad.lab.recipes import run
from rankgrad.lab.training import checkpoint, log, output, signals
from rankgrad.lab.training.errors import Interrupted
from rankgrad.lab.training.loop import Trainer

from runs import rows

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
DIGITS = ["epochs=2", "save_minutes=1000", "evaluate_first=true", "device=cpu"]  # 8 steps an epoch


@pytest.fixture(autouse=True)
def usual_handlers(monkeypatch):
    """What a command in a terminal has; under nohup or in the background signals are ignored."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run.run("digits", DIGITS, out=str(tmp_path_factory.mktemp("whole") / "a"))[0]


def send(monkeypatch, number, at):
    """Send this process a signal in the step ``at``."""
    inner = Trainer._train_step

    def one(self, network):
        if self.step == at:
            os.kill(os.getpid(), number)
        inner(self, network)

    monkeypatch.setattr(Trainer, "_train_step", one)


def assert_same_run(cut, whole):
    for table in ("steps", "evaluations"):
        assert rows(cut, table) == rows(whole, table)
    for name in ("last", "best"):
        assert (cut / f"{name}.safetensors").read_bytes() == (whole / f"{name}.safetensors").read_bytes()
    results = [json.loads((folder / "result.json").read_text()) for folder in (cut, whole)]
    assert results[0]["best"] == results[1]["best"] and results[0]["last"] == results[1]["last"]
    assert (cut / "report.html").is_file()


@pytest.mark.parametrize(("number", "at"), [(signal.SIGINT, 0), (signal.SIGTERM, 7), (signal.SIGHUP, 15)])
def test_a_stopped_run_loses_nothing(tmp_path, monkeypatch, capfd, whole, number, at):
    """In a step, in the last of an epoch, in the last of all: saved after it, and exact to continue."""
    with monkeypatch.context() as patch:
        send(patch, number, at)
        with pytest.raises(Interrupted) as caught:
            run.run("digits", DIGITS, out=str(tmp_path / "cut"))
    assert caught.value.number == number
    assert checkpoint.load_state(tmp_path / "cut" / "state.pt")["step"] == len(rows(tmp_path / "cut")) == at + 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL is signal.getsignal(signal.SIGHUP)
    assert "stopping after this step" in capfd.readouterr().err
    cut, _ = run.run("digits", DIGITS, out=str(tmp_path / "cut"), resume=True)
    assert_same_run(cut, whole)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_exit_status_says_which_signal(tmp_path, monkeypatch, capsys, number):
    send(monkeypatch, number, 2)
    with pytest.raises(SystemExit) as caught:
        main(["train", "digits", *DIGITS, "evaluate_first=false", "--out", str(tmp_path / "a")])
    assert caught.value.code == 128 + number
    assert "rankgrad: interrupted; resume with: rankgrad train " in capsys.readouterr().err


def test_an_evaluation_is_left_at_once_and_repeated(tmp_path, monkeypatch, whole):
    from rankgrad.lab.retrieval.task import RetrievalTask

    inner, evaluated = RetrievalTask.evaluate, []

    def evaluate(self):
        evaluated.append(1)
        if len(evaluated) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            pytest.fail("went on")
        return inner(self)

    with monkeypatch.context() as patch:
        patch.setattr(RetrievalTask, "evaluate", evaluate)
        with pytest.raises(Interrupted):
            run.run("digits", DIGITS, out=str(tmp_path / "cut"))
    assert checkpoint.load_state(tmp_path / "cut" / "state.pt")["step"] == 8
    assert [row["step"] for row in rows(tmp_path / "cut", "evaluations")] == ["0"]
    cut, _ = run.run("digits", DIGITS, out=str(tmp_path / "cut"), resume=True)
    assert_same_run(cut, whole)


def test_what_can_be_repeated_is_not_begun_after_a_signal():
    stop = signals.Stop()
    with stop.interruptible():
        pass
    stop.note(signal.SIGTERM)
    with pytest.raises(Interrupted), stop.interruptible():
        pytest.fail("begun")
    stop.note(signal.SIGINT)  # outside it waits, and the first one stays
    assert stop.number == signal.SIGTERM


def test_stopped_before_the_first_step(tmp_path, monkeypatch):
    """There is nothing to save yet, and a checkpoint of step 0 is not written."""
    from rankgrad.lab.retrieval.task import RetrievalTask

    monkeypatch.setattr(RetrievalTask, "evaluate", lambda self: os.kill(os.getpid(), signal.SIGHUP))
    with pytest.raises(Interrupted):
        run.run("digits", DIGITS, out=str(tmp_path / "a"))
    assert not (tmp_path / "a" / "state.pt").exists()


def test_ignored_signals_stay_ignored(monkeypatch):
    """nohup ignores SIGHUP, a shell ignores SIGINT of what runs in the background: both mean to go on."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with signals.noted() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGINT)
        assert not stop.number
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN is signal.getsignal(signal.SIGINT)


SHORT = ["epochs=1", "evaluate_first=false", "device=cpu"]


def begun(tmp_path, *settings):
    """A command that trains, as a shell starts it."""
    return [sys.executable, "-m", "rankgrad", "train", "digits", *settings, "--out", str(tmp_path / "a")]


def test_a_run_goes_on_where_nothing_reads_its_output(tmp_path):
    """`rankgrad train ... 2>&1 | head -0`."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(begun(tmp_path, *SHORT), stdout=write, stderr=write, check=False)
    os.close(write)
    assert done.returncode == 0 and (tmp_path / "a" / "report.html").is_file()


def test_a_run_goes_on_where_its_output_finds_no_room(tmp_path):
    with open("/dev/full", "w") as full:
        done = subprocess.run(begun(tmp_path, *SHORT), stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 0 and not done.stderr and (tmp_path / "a" / "report.html").is_file()


def test_a_run_stops_by_ctrl_c_where_nothing_reads_its_output(tmp_path):
    """Ctrl-C ends `tee` too, behind `2>&1 | tee log`."""
    read, write = os.pipe()
    process = subprocess.Popen(begun(tmp_path, *DIGITS, "epochs=500"), stdout=write, stderr=write)
    os.close(write)
    wait_for_steps(tmp_path, process)
    os.close(read)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert checkpoint.load_state(tmp_path / "a" / "state.pt")["step"] == len(rows(tmp_path / "a"))


def wait_for_steps(tmp_path, process):
    deadline = time.monotonic() + 100
    while process.poll() is None and time.monotonic() < deadline:
        if len(log.read_table(tmp_path / "a" / "steps.csv")) >= 3:
            return
        time.sleep(0.05)
    pytest.fail(f"no steps, status {process.poll()}")


def test_a_closed_terminal(tmp_path):
    """The terminal goes, the system sends SIGHUP, and every write to the terminal fails."""
    ours, theirs = os.openpty()
    with (tmp_path / "said").open("wb") as said:
        process = subprocess.Popen(
            begun(tmp_path, *DIGITS, "epochs=500"),
            stdin=theirs,
            stdout=theirs,
            stderr=said,
            preexec_fn=lambda: (os.setsid(), fcntl.ioctl(0, termios.TIOCSCTTY, 0)),
        )
    os.close(theirs)
    wait_for_steps(tmp_path, process)
    os.close(ours)
    assert process.wait(60) == 128 + signal.SIGHUP
    assert "rankgrad: interrupted; resume with: rankgrad train " in (tmp_path / "said").read_text()
    assert checkpoint.load_state(tmp_path / "a" / "state.pt")["step"] == len(rows(tmp_path / "a"))


def test_output_is_dropped_only_where_it_cannot_be_written(capsys):
    with output.ignoring_write_errors():
        print("heard")
        print("too", file=sys.stderr)
    assert capsys.readouterr() == ("heard\n", "too\n")


@pytest.mark.parametrize("verb", ["ls", "report", "before"])
def test_an_interrupt_is_a_line(tmp_path, monkeypatch, capsys, verb):
    """In a verb, and while the verbs are being imported."""

    def interrupted(*args, **options):
        raise KeyboardInterrupt

    where = {"ls": (recipes, "summary"), "report": (run, "write_report"), "before": (cli, "build")}[verb]
    monkeypatch.setattr(*where, interrupted)
    with pytest.raises(SystemExit) as caught:
        main(["report", str(tmp_path)] if verb == "report" else ["ls"])
    assert caught.value.code == 130 and capsys.readouterr().err == "rankgrad: interrupted\n"


def test_a_second_interrupt_stops_at_once(tmp_path, monkeypatch):
    calls = []

    def one(self, network):
        calls.append(self.step)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("went on")

    monkeypatch.setattr(Trainer, "_train_step", one)
    with pytest.raises(KeyboardInterrupt):
        run.run("digits", ["epochs=1", "evaluate_first=false", "device=cpu"], out=str(tmp_path / "a"))
    assert calls == [0] and not (tmp_path / "a" / "state.pt").exists()


def two_processes(tmp_path, act):
    """Run torchrun until some steps are done, ``act`` on it, and wait: its status and the seconds that it took."""
    settings = ["epochs=30", "save_minutes=1000", "evaluate_first=false", "device=cpu", "batch.size=40"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command += ["-m", "rankgrad", "train", "digits", *settings, "--out", str(tmp_path / "a")]
    with (tmp_path / "said").open("wb") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, env=os.environ | {"OMP_NUM_THREADS": "1"})
        deadline = time.monotonic() + 200
        while process.poll() is None and time.monotonic() < deadline:
            if len(log.read_table(tmp_path / "a" / "steps.csv")) >= 3:
                act(process)
                break
            time.sleep(0.05)
        begin = time.monotonic()
        try:
            process.wait(60)
        finally:
            process.kill()
    return process, time.monotonic() - begin


def test_two_processes_stop_together(tmp_path):
    """SIGTERM to torchrun, as Slurm sends it: both processes end after the same step, saved, exact to continue."""
    process, seconds = two_processes(tmp_path, lambda torchrun: torchrun.send_signal(signal.SIGTERM))
    assert seconds < 30  # torchrun kills after 30 s
    steps = len(rows(tmp_path / "a"))
    assert 3 <= steps < 30 * 22, (tmp_path / "said").read_text()
    assert checkpoint.load_state(tmp_path / "a" / "state.pt")["step"] == steps
    assert process.returncode != 0


@pytest.mark.slow
@pytest.mark.parametrize("rank", ["0", "1"])
def test_one_of_two_processes_is_killed(tmp_path, rank):
    """The other one ends within seconds, with a line and without a traceback. (torchrun adds its own summary.)"""

    def kill(torchrun):
        for child in Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split():
            if f"\0RANK={rank}\0" in Path(f"/proc/{child}/environ").read_text():
                os.kill(int(child), signal.SIGKILL)

    process, seconds = two_processes(tmp_path, kill)
    said = (tmp_path / "said").read_text()
    assert process.returncode == 1 and seconds < 20, said
    assert "rankgrad: another process of this run has ended, so this one ends too" in said
    assert "rankgrad/lab" not in said  # no line of a traceback of ours
