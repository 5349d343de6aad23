"""A script that is run again inside its own job: the distributed form of the seed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.launch.functions.test_local import ran

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = """
COMMAND = "{python} -m worldsize run --nproc-per-node {{num_processes}} there/main.py --".format(python=sys.executable)
config = ws.SlurmConfig(mode="local", tasks_per_node=2, use_distributed_env=True, distributed_launch_command=COMMAND)
"""


def test_it_runs_the_function_and_submits_nothing(tmp_path: Path) -> None:
    """The script's words reach it; rank 0's value comes back, of a class of the script's own."""
    text = f"""{CONFIG}
class Mine:
    def __init__(self, *values): self.values = values
@ws.slurm_fn
def main(x): return Mine(x, os.environ["RANK"], sys.argv[1:])
if __name__ == "__main__":
    job = main[config](7)
    if "RANK" not in os.environ:
        print([each.values for each in job.results()], isinstance(job.result(), Mine), len(os.listdir("slurm")))
"""
    done = ran(tmp_path, text, "--lr", "a b")
    assert done.stdout == f"[(7, '0', {['--lr', 'a b']}), (7, '1', {['--lr', 'a b']})] True 1\n", done.stderr


def test_its_exception_is_that_of_the_script(tmp_path: Path) -> None:
    """Whoever catches the script's own class catches it."""
    text = f"""{CONFIG}
class OddError(Exception): pass
@ws.slurm_fn
def main():
    if os.environ["RANK"] == "1": raise OddError("odd")
    time.sleep(60)
if __name__ == "__main__":
    try: main[config]().result()
    except OddError as error:
        if "RANK" in os.environ: raise
        print(error, error.__notes__[0].split()[:6])
"""
    done = ran(tmp_path, text)
    assert done.stdout.startswith("odd ['On', 'rank', '1', 'of', '2', 'on']"), done.stderr


@pytest.mark.parametrize("form", ["[main[config](x) for x in (1, 2)]", "main[config].map_array((1, 2))"])
def test_each_job_makes_its_own_call(tmp_path: Path, form: str) -> None:
    """A script that submits twice runs each call once, in its own job."""
    text = f"""{CONFIG}
@ws.slurm_fn
def main(x):
    if os.environ["RANK"] == "0": open("calls", "a").write(str(x))
    return 10 * x
if __name__ == "__main__":
    jobs = {form}
    if "RANK" not in os.environ:
        print([job.result() for job in jobs])
"""
    done = ran(tmp_path, text)
    assert done.stdout == "[10, 20]\n", done.stderr
    assert sorted((tmp_path / "calls").read_text()) == ["1", "2"]
