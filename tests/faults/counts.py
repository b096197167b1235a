"""Long counts: kills, forks, requests, races, starts and seeds by the thousand, one line for each.

    counts.py                      everything, on all cores; what counts.sh runs
    counts.py kills --count 1000   one of them
    counts.py 'seeds channels' --seeds 1000000 --limit 300   as many of a million as five minutes allow
    counts.py --count 50           everything, fewer times

A line says how many there were, how many failed, and how long they took; what failed is told below it.
The exit code is 1 if anything failed. The programs are those of TESSERA_BIN's folder.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import itertools
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = pathlib.Path(os.environ.get("TESSERA_BIN", ROOT / "build/release/bin/tessera")).parent
PROMPT_MS = 1000.0
CORES = len(os.sched_getaffinity(0))

# What is killed when: a name, and the words for fault_worker.
PHASES = {
    "collective, shm": ("shm", "phase=collective"),
    "collective, gloo": ("gloo", "phase=collective"),
    "meeting, shm": ("shm", "phase=meeting"),
    "meeting, gloo": ("gloo", "phase=meeting"),
    "creation, shm": ("shm", "phase=creation"),
    "creation, gloo": ("gloo", "phase=creation"),
    "teardown, shm": ("shm", "phase=teardown"),
    "teardown, gloo": ("gloo", "phase=teardown"),
    "no pidfd, shm": ("shm", "phase=collective", "pidfds=refused"),
    "no pidfd, gloo": ("gloo", "phase=collective", "pidfds=refused"),
    "children live, shm": ("shm", "phase=collective", "children=1"),
    "children live, gloo": ("gloo", "phase=collective", "children=1"),
    "large process, shm": ("shm", "phase=collective", "large=1", "ranks=2"),
    "large process, gloo": ("gloo", "phase=collective", "large=1", "ranks=2"),
}


def say(name, count, failures, milliseconds=(), more=""):
    """Print the line of one count; returns whether nothing failed."""
    line = f"{name:28s} {count:9,d}  failed {len(failures)}"
    if milliseconds:
        ordered = sorted(milliseconds)
        place = lambda share: ordered[min(len(ordered) - 1, int(share * len(ordered)))]  # noqa: E731
        line += f"  p50 {place(0.5):.1f} ms  p99 {place(0.99):.1f} ms  max {ordered[-1]:.1f} ms"
    print(line + (f"  {more}" if more else ""), flush=True)
    for text, times in collections.Counter(failures).most_common(5):
        print(f"    {times} x {text[:400]}", flush=True)
    return not failures


def shares(count, parts):
    """`count` in at most `parts` nearly equal numbers."""
    parts = max(1, min(parts, count))
    return [count // parts + (i < count % parts) for i in range(parts)]


def environment(**more):
    dropped = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {k: v for k, v in os.environ.items() if k not in dropped}
    # Ranks without a GPU: this is not about devices, and looking for them takes longer than the rest.
    return {**kept, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **more}


def run_all(commands, limit):
    """Run the commands beside each other; (exit code or None if it took too long, output) of each."""

    def run(command):
        words, env = command
        with tempfile.TemporaryFile() as out:
            process = subprocess.Popen(
                [str(w) for w in words],
                env=environment(**env),
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(timeout=limit)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                code = None
            out.seek(0)
            return code, out.read().decode(errors="replace")

    with concurrent.futures.ThreadPoolExecutor(len(commands)) as pool:
        return list(pool.map(run, commands))


def bare(text):
    """A text without what differs from job to job."""
    text = re.sub(r"pid \d+", "pid N", text)
    return re.sub(r"(#|\[|step |'group )\d+", r"\1N", text)


def count_kills(name, options):
    engine, *words = PHASES[name]
    # Ranks need cores of their own: what is looked for is our delay, not the scheduler's.
    jobs = max(1, CORES // (2 if "ranks=2" in words else 3))
    commands = [
        (
            [BIN / "fault_worker", "kills", *words, f"count={n}", f"seed={options.first_seed + i}"],
            {"TESSERA_ENGINE": engine},
        )
        for i, n in enumerate(shares(options.count, jobs))
    ]
    failures, delays, texts, count = [], [], collections.Counter(), 0
    for code, out in run_all(commands, options.limit):
        for line in out.splitlines():
            if not line.startswith("{"):
                continue
            kill = json.loads(line)
            count += 1
            delays.append(kill["ms"])
            texts[bare(kill["texts"][0])] += 1
            if kill["engine"] != engine:
                failures.append(f"the engine was {kill['engine']}")
            elif not kill["named"]:
                failures.append("the dead is not named: " + " | ".join(sorted(set(map(bare, kill["texts"])))))
            elif len(set(kill["texts"])) > 1:
                failures.append("texts differ: " + " | ".join(sorted(set(map(bare, kill["texts"])))))
            elif kill["ms"] > PROMPT_MS:
                failures.append("named later than 1 s")
        if code != 0:
            failures.append(f"the driver ended with {code}: {out.strip()[-300:]}")
    return say(f"kills: {name}", count, failures, delays, f"{len(texts)} texts")


def count_forks(options):
    failures, count = [], 0
    per_job = 50
    commands = []
    for engine in ("shm", "gloo"):
        for i in range(max(1, options.count // (2 * 2 * per_job))):
            commands.append(
                (
                    [
                        BIN / "fault_worker",
                        "fork-places",
                        f"count={per_job}",
                        f"seed={options.first_seed + i}",
                    ],
                    {"TESSERA_ENGINE": engine},
                )
            )
    jobs = max(1, CORES // 3)
    for first in range(0, len(commands), jobs):
        for code, out in run_all(commands[first : first + jobs], options.limit):
            lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
            count += sum(line["forks"] for line in lines)
            if code != 0:
                failures.append(f"exit code {code}: {out.strip()[-300:]}")
    return say("forks at any moment", count, failures)


def count_races(options):
    jobs = max(1, CORES // 2)
    commands = [
        ([BIN / "checkpoint_format_test", "--gtest_filter=Races.*"], {"TESSERA_RACES": str(n)})
        for n in shares(options.count, jobs)
    ]
    failures = [out.strip()[-400:] for code, out in run_all(commands, options.limit) if code != 0]
    good = say("loads beside saves", 2 * options.count, failures, more="C++: of one step, and beside keep")
    # Two ranks and a saver each.
    jobs = max(1, CORES // 3)
    python = os.environ.get("TESSERA_TEST_PYTHON", sys.executable)
    paths = f"{ROOT}/python:{ROOT}/tests/python:{ROOT}/tests/support"
    commands = [
        (
            [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", ROOT / "tests/checkpoint/test_races.py"],
            {"TESSERA_RACES": str(n), "PYTHONPATH": paths},
        )
        for n in shares(options.count, jobs)
    ]
    failures = [out.strip()[-400:] for code, out in run_all(commands, options.limit) if code != 0]
    return say("loads beside saves, Python", options.count, failures, more="two ranks") and good


def living(mark):
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            is_marked = mark in (entry / "environ").read_bytes()
            if is_marked and (entry / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def kill_launchers(seed, count):
    dice = random.Random(seed)
    folder = tempfile.mkdtemp(prefix="tessera-counts-")
    mark = f"TESSERA_COUNTS_MARK={folder}"
    env = environment(TMPDIR=folder, TESSERA_COUNTS_MARK=folder)
    failures = []
    for _ in range(count):
        process = subprocess.Popen(
            [BIN / "tessera", "run", "-n", "2", "--", "sh", "-c", "sleep 300 & sleep 300 & wait"],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        time.sleep(dice.random() * 0.03)
        process.kill()
        process.wait()
        end = time.monotonic() + 5
        while True:
            left, folders = living(mark.encode()), os.listdir(folder)
            if not left and not folders:
                break
            if time.monotonic() > end:
                failures.append(f"left: {len(left)} processes, {len(folders)} folders")
                for pid in left:
                    os.kill(pid, signal.SIGKILL)
                shutil.rmtree(folder)
                os.mkdir(folder)
                break
            time.sleep(0.005)
    shutil.rmtree(folder, ignore_errors=True)
    return failures


def count_launchers(options):
    parts = shares(options.count, max(1, CORES // 2))
    seeds = range(options.first_seed, options.first_seed + len(parts))
    with concurrent.futures.ProcessPoolExecutor(len(parts)) as pool:
        failures = [f for found in pool.map(kill_launchers, seeds, parts) for f in found]
    return say("launchers killed at start", options.count, failures)


def time_start(program, words):
    begin = time.perf_counter()
    code = subprocess.call(
        [program, "run", *words, "--", "true"], env=environment(), stdin=subprocess.DEVNULL
    )
    return code, (time.perf_counter() - begin) * 1e3


def count_starts(options):
    """Starts of a job; beside a launcher of before, TESSERA_BIN_BEFORE, by turns if there is one."""
    programs = {"start of a job": str(BIN / "tessera")}
    if os.environ.get("TESSERA_BIN_BEFORE"):
        programs["start of a job, before"] = os.environ["TESSERA_BIN_BEFORE"]
    times = {name: [] for name in programs}
    failures = []
    for _ in range(min(options.count, 300)):
        for name, program in programs.items():
            code, milliseconds = time_start(program, ["-n", "2"])
            times[name].append(milliseconds)
            if code != 0:
                failures.append(f"{name}: exit code {code}")
    for name, values in times.items():
        say(name, len(values), failures, values, "two ranks of `true`, from exec to the end")
    return not failures


def count_requests(options):
    count = options.requests or options.count * 1000
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider"]
    command += [ROOT / "tests/launch/test_strangers.py", "-k", "random_requests"]
    env = {
        "TESSERA_FUZZ_REQUESTS": str(count),
        "TESSERA_BIN": str(BIN / "tessera"),
        "PYTHONPATH": f"{ROOT}/tests/support",
    }
    ((code, out),) = run_all([(command, env)], options.limit)
    told = re.search(r"^.*requests to the launcher.*$", out, re.M)
    failures = [] if code == 0 else [out.strip()[-600:]]
    return say("requests without the secret", count, failures, more=told[0] if told else "")


WORLDS = ("checkpoints", "channels", "agreement", "launchers", "meetings")
SEEDS_AT_ONCE = 500


def count_seeds(world, options):
    """Seeds in order, so that a count cut short by the limit is still one of the first so many."""
    count = options.seeds or options.count * 1000
    begin = time.monotonic()
    end = begin + options.limit
    firsts = iter(range(options.first_seed, options.first_seed + count, SEEDS_AT_ONCE))
    last = options.first_seed + count
    done, failures = 0, []

    def run(first):
        number = min(SEEDS_AT_ONCE, last - first)
        words = [BIN / "simulator", "--world", world, "--first", str(first), "--count", str(number)]
        return subprocess.run(words, capture_output=True, text=True)

    with concurrent.futures.ThreadPoolExecutor(CORES) as pool:
        running = {pool.submit(run, first) for first in itertools.islice(firsts, CORES)}
        while running:
            ready, running = concurrent.futures.wait(running, return_when="FIRST_COMPLETED")
            for outcome in (future.result() for future in ready):
                done += sum(int(n) for n in re.findall(r": (\d+) seeds from", outcome.stdout))
                found = [line for line in outcome.stdout.splitlines() if line.startswith("FAILED")]
                if outcome.returncode != 0 and not found:
                    found = [f"the simulator ended with {outcome.returncode}: {outcome.stderr[-300:]}"]
                failures += found
            if time.monotonic() < end and len(failures) < 10:
                running |= {pool.submit(run, first) for first in itertools.islice(firsts, len(ready))}
    seconds = time.monotonic() - begin
    more = f"from {options.first_seed}, {seconds:.0f} s on {CORES} cores"
    if done < count:
        more += f", {count - done:,d} not run"
    return say(f"seeds: {world}", done, failures, more=more)


COUNTS = {
    **{f"kills {name}": (lambda options, name=name: count_kills(name, options)) for name in PHASES},
    "forks": count_forks,
    "launchers": count_launchers,
    "starts": count_starts,
    "races": count_races,
    "requests": count_requests,
    **{f"seeds {world}": (lambda options, world=world: count_seeds(world, options)) for world in WORLDS},
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "which",
        nargs="*",
        help="kills, forks, launchers, starts, races, requests, seeds, or a part as 'seeds channels'",
    )
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--requests", type=int, help="a thousand times --count by default")
    parser.add_argument("--seeds", type=int, help="a thousand times --count by default")
    parser.add_argument("--first-seed", type=int, default=1, help="another one makes other places and worlds")
    parser.add_argument("--limit", type=float, default=240, help="seconds for one of them")
    options = parser.parse_args()
    unknown = [w for w in options.which if not any(name.startswith(w) for name in COUNTS)]
    if unknown:
        parser.error(f"no count {unknown[0]}")
    good = True
    for name, count in COUNTS.items():
        if options.which and not any(name.startswith(word) for word in options.which):
            continue
        good &= count(options)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
