"""Long counts: kills, forks, requests, races, starts and seeds by the thousand, one line for each.

    counts.py                      everything, on all cores; what counts.sh runs
    counts.py kills --count 1000   one of them
    counts.py 'seeds channels' --seeds 1000000 --limit 300   as many of a million as five minutes allow
    counts.py --count 50           everything, fewer times
    counts.py launchers forks=12000 'seeds launchers=100000' --limit 1800 --to FILE
                                   these, in this order, so many of each; what each came to goes to FILE

A line says how many there were, how many failed, and how long they took; what failed is told below it.
The exit code is 1 if anything failed or was cut short. The programs are those of TESSERA_BIN's folder.
A count that is cut short, by its limit or because this program is told to end, says how far it came. FILE
is added to after each count, with the time and the load, so what was counted before a sudden end is there.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import copy
import itertools
import json
import multiprocessing
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
import traceback

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = pathlib.Path(os.environ.get("TESSERA_BIN", ROOT / "build/release/bin/tessera")).parent
PROMPT_MS = 1000.0
CORES = len(os.sched_getaffinity(0))
# On few cores jobs run one after the other, so a count takes as many times longer.
LIMIT_SECONDS = 240 if CORES >= 8 else 3600

# One test makes a whole count, so its usual limit does not hold.
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "timeout=0")

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


def say(name, count, failures, milliseconds=(), more="", wanted=0):
    """Print the line of one count; returns whether nothing failed and all that was wanted was done."""
    if count < wanted:
        more += f"{', ' if more else ''}cut short: {wanted - count:,d} not run"
    line = f"{name:28s} {count:9,d}  failed {len(failures)}"
    if milliseconds:
        ordered = sorted(milliseconds)
        place = lambda share: ordered[min(len(ordered) - 1, int(share * len(ordered)))]  # noqa: E731
        line += f"  p50 {place(0.5):.1f} ms  p99 {place(0.99):.1f} ms  max {ordered[-1]:.1f} ms"
    tell(line + (f"  {more}" if more else ""))
    for text, times in collections.Counter(failures).most_common(5):
        tell(f"    {times} x " + text[:400].replace("\n", "\n        "))
    return not failures and count >= wanted


told = []  # the lines of the count that runs


def tell(line):
    told.append(line)
    print(line, flush=True)


def shares(count, parts):
    """`count` in at most `parts` nearly equal numbers."""
    parts = max(1, min(parts, count))
    return [count // parts + (i < count % parts) for i in range(parts)]


def environment(**more):
    dropped = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {k: v for k, v in os.environ.items() if k not in dropped}
    # Ranks without a GPU: this is not about devices, and looking for them takes longer than the rest.
    return {**kept, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **more}


running = set()
is_told_to_end = False


def end_early(*_):
    """What runs has told of what it did, and that is counted."""
    global is_told_to_end
    is_told_to_end = True
    for process in list(running):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for child in multiprocessing.active_children():
        child.terminate()  # has this handler too


def run_all(commands, limit):
    """Run the commands beside each other; (exit code or None if it was cut short, output) of each."""

    def run(command):
        words, env = command
        if is_told_to_end:
            return None, ""
        with tempfile.TemporaryFile() as out:
            process = subprocess.Popen(
                [str(w) for w in words],
                env=environment(**env),
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            running.add(process)
            if is_told_to_end:  # between the two, when nobody else saw it
                os.killpg(process.pid, signal.SIGKILL)
            try:
                code = process.wait(timeout=limit)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                code = None
            running.discard(process)
            if is_told_to_end and code == -signal.SIGKILL:
                code = None
            out.seek(0)
            return code, out.read().decode(errors="replace")

    with concurrent.futures.ThreadPoolExecutor(len(commands)) as pool:
        ended = [pool.submit(run, command) for command in commands]
        # Awake now and then: a signal that reached another thread is handled by this one alone.
        while concurrent.futures.wait(ended, timeout=0.2).not_done:
            if is_told_to_end:
                end_early()
        return [each.result() for each in ended]


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
            if not (line.startswith("{") and line.endswith("}")):  # one that was being written
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
        if code not in (0, None):
            failures.append(f"the driver ended with {code}: {out.strip()[-300:]}")
    return say(f"kills: {name}", count, failures, delays, f"{len(texts)} texts", options.count)


def count_forks(options):
    end = time.monotonic() + options.limit
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
        if is_told_to_end or time.monotonic() > end:
            break
        # The worker's own limits are shorter.
        for code, out in run_all(commands[first : first + jobs], 240):
            lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
            count += sum(line["forks"] for line in lines)
            if code != 0 and not is_told_to_end:
                failures.append(f"exit code {code}: {out.strip()[-300:]}")
    return say("forks at any moment", count, failures, wanted=2 * per_job * len(commands))


def run_shares(commands, parts, limit):
    """How many of `parts`, one a command, were done, and how those failed that did."""
    results = run_all(commands, limit)
    done = sum(n for n, (code, _) in zip(parts, results, strict=True) if code is not None)
    return done, [out.strip()[-400:] for code, out in results if code not in (0, None)]


def count_races(options):
    parts = shares(options.count, max(1, CORES // 2))
    commands = [
        ([BIN / "checkpoint_format_test", "--gtest_filter=Races.*"], {"TESSERA_RACES": str(n)}) for n in parts
    ]
    done, failures = run_shares(commands, parts, options.limit)
    what = "C++: of one step, and beside keep"
    good = say("loads beside saves", 2 * done, failures, more=what, wanted=2 * options.count)
    # Two ranks and a saver each.
    parts = shares(options.count, max(1, CORES // 3))
    python = os.environ.get("TESSERA_TEST_PYTHON", sys.executable)
    paths = f"{ROOT}/python:{ROOT}/tests/python:{ROOT}/tests/support"
    commands = [
        (
            [python, *PYTEST, ROOT / "tests/checkpoint/test_races.py"],
            {"TESSERA_RACES": str(n), "PYTHONPATH": paths},
        )
        for n in parts
    ]
    done, failures = run_shares(commands, parts, options.limit)
    name = "loads beside saves, Python"
    return say(name, done, failures, more="two ranks", wanted=options.count) and good


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


def kill_launchers(seed, count, limit):
    """How many were killed, and what some of them left."""
    last = time.monotonic() + limit
    dice = random.Random(seed)
    folder = tempfile.mkdtemp(prefix="tessera-counts-")
    mark = f"TESSERA_COUNTS_MARK={folder}"
    env = environment(TMPDIR=folder, TESSERA_COUNTS_MARK=folder)
    failures, done = [], 0
    while done < count and time.monotonic() < last and not is_told_to_end:
        done += 1
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
    return done, failures


def count_launchers(options):
    parts = shares(options.count, max(1, CORES // 2))
    seeds = range(options.first_seed, options.first_seed + len(parts))
    with concurrent.futures.ProcessPoolExecutor(len(parts)) as pool:
        found = list(pool.map(kill_launchers, seeds, parts, itertools.repeat(options.limit)))
    failures = [failure for _, left in found for failure in left]
    done = sum(number for number, _ in found)
    return say("launchers killed at start", done, failures, wanted=options.count)


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
    command = [sys.executable, *PYTEST, "-s"]
    command += [ROOT / "tests/launch/test_strangers.py", "-k", "random_requests"]
    env = {
        "TESSERA_FUZZ_REQUESTS": str(count),
        "TESSERA_BIN": str(BIN / "tessera"),
        "PYTHONPATH": f"{ROOT}/tests/support",
    }
    ((code, out),) = run_all([(command, env)], options.limit)
    split = re.search(r"^.*requests to the launcher.*$", out, re.M)
    failures = [] if code in (0, None) else [out.strip()[-600:]]
    done = 0 if code is None else count
    return say("requests without the secret", done, failures, more=split[0] if split else "", wanted=count)


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
        open_futures = {pool.submit(run, first) for first in itertools.islice(firsts, CORES)}
        while open_futures:
            ready, open_futures = concurrent.futures.wait(open_futures, return_when="FIRST_COMPLETED")
            for outcome in (future.result() for future in ready):
                done += sum(int(n) for n in re.findall(r": (\d+) seeds from", outcome.stdout))
                found = [line for line in outcome.stdout.splitlines() if line.startswith("FAILED")]
                if outcome.returncode != 0 and not found:
                    found = [f"the simulator ended with {outcome.returncode}: {outcome.stderr[-300:]}"]
                failures += found
            if time.monotonic() < end and len(failures) < 10 and not is_told_to_end:
                open_futures |= {pool.submit(run, first) for first in itertools.islice(firsts, len(ready))}
    seconds = time.monotonic() - begin
    more = f"from {options.first_seed}, {seconds:.0f} s on {CORES} cores"
    return say(f"seeds: {world}", done, failures, more=more, wanted=count)


COUNTS = {
    **{f"kills {name}": (lambda options, name=name: count_kills(name, options)) for name in PHASES},
    "forks": count_forks,
    "launchers": count_launchers,
    "starts": count_starts,
    "races": count_races,
    "requests": count_requests,
    **{f"seeds {world}": (lambda options, world=world: count_seeds(world, options)) for world in WORLDS},
}


def chosen(words, options):
    """The counts that the words name, in the words' order, each with its options."""
    names = []
    for word in words or ["="]:
        start, _, number = word.partition("=")
        own = copy.copy(options)
        if number:
            own.count = own.requests = own.seeds = int(number)
        for name in COUNTS:
            if name.startswith(start) and name not in names:
                names.append(name)
                yield name, own


def add_to_file(file, began, load_before):
    """The lines of the count that has ended, with when, of which state, for how long and beside what."""
    describe = ["git", "-C", ROOT, "describe", "--always", "--dirty"]
    state = subprocess.run(describe, capture_output=True, text=True).stdout.strip() or "unknown state"
    stamp = time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime()) + f" {state} {time.time() - began:.0f} s"
    stamp += f" load {load_before:.1f} to {os.getloadavg()[0]:.1f}  "
    with open(file, "a") as out:
        out.writelines(f"{line if line.startswith(' ') else stamp + line}\n" for line in told)
        out.flush()
        os.fsync(out.fileno())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "which",
        nargs="*",
        help="kills, forks, launchers, starts, races, requests, seeds, or a part as 'seeds channels', in the "
        "order to run them in; 'forks=12000' for another number of one",
    )
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--requests", type=int, help="a thousand times --count by default")
    parser.add_argument("--seeds", type=int, help="a thousand times --count by default")
    parser.add_argument("--first-seed", type=int, default=1, help="another one makes other places and worlds")
    parser.add_argument(
        "--limit", type=float, default=LIMIT_SECONDS, help="seconds for one of them (here %(default)s)"
    )
    parser.add_argument("--to", metavar="FILE", help="add the line of each to this file once it has ended")
    options = parser.parse_args()
    for word in options.which:
        start, _, number = word.partition("=")
        if not any(name.startswith(start) for name in COUNTS) or ("=" in word and not number.isdigit()):
            parser.error(f"no count {word}")
    signal.signal(signal.SIGTERM, end_early)
    signal.signal(signal.SIGINT, end_early)
    good = True
    for name, own in chosen(options.which, options):
        if is_told_to_end:
            return 1
        told.clear()
        began, load_before = time.time(), os.getloadavg()[0]
        try:
            good &= COUNTS[name](own)
        except Exception:  # the others are worth having
            traceback.print_exc()
            tell(f"{name:28s} ended: {traceback.format_exc().splitlines()[-1]}")
            good = False
        if options.to:
            add_to_file(options.to, began, load_before)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
