"""Several tables in one queue on one device, for a GPU that is lent for some minutes.

    python -m benchmarks.queue [--parallel 9] [--mps] [--minutes 25] [--list] COMMAND ...
    python -m benchmarks.queue --parallel 9 --mps --minutes 25 \\
        "voc --choose --epochs 12 --seeds 2 --rows 'log_ap, GIoU$' --data DIR --weights FILE" \\
        "embeddings cars=DIR --rows Proxy --weights FILE"

A COMMAND is what follows `python -m benchmarks.`, of `voc` or `embeddings`; its own --parallel, --mps and
--minutes do not count. The runs of the first command come first, those of the next take the processes that are
left. All commands are checked before anything is trained (--list stops there), and every table is written anew
after each run: an early end leaves what is finished, and the same call goes on with the rest.
"""

from __future__ import annotations

import argparse
import shlex
from types import ModuleType

from benchmarks import embeddings, side_by_side, voc
from benchmarks.side_by_side import Job

TABLES: dict[str, ModuleType] = {"voc": voc, "embeddings": embeddings}


class Command:
    """One table: what it still has to run, and how it is written.

    Args:
        text: Name of the table and its arguments.
    """

    def __init__(self, text: str) -> None:
        try:
            name, *words = shlex.split(text) or [""]
        except ValueError as error:  # a quote that is not closed
            raise SystemExit(f"COMMAND: {error}, received {text!r}") from None
        if name not in TABLES:
            raise SystemExit(f"COMMAND: expected one of {', '.join(TABLES)} first, received {text!r}")
        self.table, self.args = TABLES[name], TABLES[name].parsed(words)

    def jobs(self) -> list[Job]:
        """Runs that can be done by now and have not ended."""
        jobs: list[Job] = self.table.jobs_of(self.args)
        return jobs

    def write(self) -> str:
        """Write the table of what is finished."""
        text: str = self.table.write_table(self.args)
        return text


def main() -> None:
    """Check all commands, run what they need, and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commands", nargs="+", metavar="COMMAND")
    parser.add_argument(
        "--parallel", type=side_by_side.at_least_one, default=1, help="runs at a time on the device"
    )
    parser.add_argument("--mps", action="store_true", help="start the multi-process service around the runs")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop then, to go on in another call")
    parser.add_argument("--list", action="store_true", help="only say what would be run")
    args = parser.parse_args()
    commands = [Command(text) for text in args.commands]
    if args.list:
        for job in (job for command in commands for job in command.jobs()):
            print(f"{job.row}, seed {job.seed}: rankgrad train {job.recipe} {shlex.join(job.settings)}")
        return

    def jobs() -> list[Job]:
        for command in commands:
            command.write()
        return [job for command in commands for job in command.jobs()]

    side_by_side.train((), parallel=args.parallel, mps=args.mps, minutes=args.minutes, further=jobs)
    for command in commands:
        print(command.write())


if __name__ == "__main__":
    side_by_side.without_traceback(main)
