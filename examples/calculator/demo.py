"""The main job: trains the calculator agent's model and says by how much the held-out reward rose.

    python examples/calculator/demo.py [--seed N] [--min-gain X] [--resume] [key=value …]

Last line: `demo: reward_before=… reward_after=… gain=… minutes=…`. Exit status 1 when the gain falls short.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent


def run_dirs(seed: int) -> list[Path]:
    """Existing run folders of this seed, oldest first."""
    found = Path("runs").glob(f"demo-seed{seed}-*")
    return sorted(found, key=lambda p: int(p.name.rpartition("-")[2]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--min-gain", type=float, default=0.5)
    parser.add_argument("--resume", action="store_true", help="go on with the newest run of this seed")
    parser.add_argument("overrides", nargs="*", help="settings of the run file, such as training.steps=6")
    options = parser.parse_args()

    dirs = run_dirs(options.seed)
    if options.resume and not dirs:
        parser.error(f"no run of seed {options.seed} under runs/ to resume")
    number = int(dirs[-1].name.rpartition("-")[2]) if dirs else 0
    run_dir = dirs[-1] if options.resume else Path("runs") / f"demo-seed{options.seed}-{number + 1}"

    command = [sys.executable, "-m", "leyden", "train", str(HERE / "run.yaml"), f"seed={options.seed}"]
    command += [f"output_dir={run_dir.resolve()}", *options.overrides]
    command += ["--resume"] if options.resume else []
    started = time.monotonic()
    code = subprocess.run(command).returncode
    minutes = (time.monotonic() - started) / 60
    if code != 0:
        print(f"demo: failed exit_code={code} minutes={minutes:.1f}")
        return code
    summary = json.loads((run_dir / "summary.json").read_text())
    before, after = summary["heldout_before"], summary["heldout_after"]
    gain = after - before
    print(
        f"demo: reward_before={before:.3f} reward_after={after:.3f} gain={gain:.3f} minutes={minutes:.1f} "
        f"heldout_tasks={summary['heldout_tasks']} seed={options.seed}"
    )
    return 0 if gain >= options.min_gain else 1


if __name__ == "__main__":
    sys.exit(main())
