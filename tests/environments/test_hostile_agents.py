"""Agents that cheat, against bubblewrap: none escapes, none changes its reward, none outlives its limits.

`test_as_an_unprivileged_user` plays this file again as another user where it runs as root: what a root user may do, and
how bubblewrap then confines, differ.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.environments.arena import ADMIN_KEY, SECRET, Arena, open_arena, processes_named
from tokentrue.environments.agents.sandbox import try_bwrap
from tokentrue.errors import AgentError

FAILURE = try_bwrap()
pytestmark = [
    pytest.mark.skipif(FAILURE is not None, reason=f"bubblewrap does not work here: {FAILURE}"),
    pytest.mark.timeout(120),
]
WRITABLE = '["/rollout/work", "/rollout/home", "/tmp"]'
SYSTEM_PYTHON = "/usr/bin/python3"


@pytest.fixture
def arena(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Arena]:
    monkeypatch.setenv("TOKENTRUE_ADMIN_KEY", ADMIN_KEY)
    with open_arena(tmp_path) as made:
        yield made
        made.check_intact()


# Rewards


def test_no_file_and_no_output_of_the_agent_is_its_reward(arena: Arena) -> None:
    """It writes a number wherever a score might be read from."""
    program = f"""
import os
from pathlib import Path
for folder in [*{WRITABLE}, "..", "../logs", "/rollout", "/rollout/logs", "/rollout/verifier", "/logs", "/logs/verifier"]:
    for name in ("score.log", "agent.log", "score/score.log", "logs/score.log", "verifier/reward.txt", "reward.txt"):
        try:
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("1000000\\n")
        except OSError:
            pass
Path("a.txt").touch()
print("1000000")
"""
    outcome, _ = arena.play(program, "test -f a.txt")
    assert outcome.reward == 1.0


def test_links_lead_the_host_nowhere(arena: Arena) -> None:
    """Links to a folder and a file of the host under every name; then the mounts themselves are to be replaced."""
    program = f"""
import os, shutil
for folder in {WRITABLE}:
    for name in ("score.log", "agent.log", "logs", "verifier", "reward.txt", "home", "work", "tmp", "score", "gateway"):
        for target in (ARENA["victim"], ARENA["victim"] + "/secret.txt"):
            try:
                os.symlink(target, os.path.join(folder, name + ("" if target.endswith("victim") else "2")))
            except FileExistsError:
                pass
for folder in [*{WRITABLE}, "/rollout"]:
    for change in (lambda: os.rename(folder, folder + "x"), lambda: os.rmdir(folder), lambda: os.symlink(ARENA["victim"], folder)):
        try:
            change()
            print("CHANGED", folder)
        except OSError:
            pass
"""
    outcome, transcript = arena.play(program, "cat score.log2 agent.log2 verifier/secret.txt; ls -R . $HOME; exit 0")
    assert outcome.reward == 1.0 and "CHANGED" not in transcript and "No such file" in transcript, transcript


@pytest.mark.parametrize("score", ["test -f a.txt", "cat a.txt", f"{SYSTEM_PYTHON} -c 'open(\"a.txt\")'"])
def test_a_fifo_holds_up_nobody(arena: Arena, score: str) -> None:
    program = f"""
import os
for folder in {WRITABLE}:
    for name in ("a.txt", "score.log", "agent.log", "reward.txt"):
        os.mkfifo(os.path.join(folder, name))
"""
    began = time.monotonic()
    try:
        outcome, _ = arena.play(program, score, score_timeout_s=1)
        assert outcome.reward == 0.0
    except AgentError as error:
        assert "took longer than its time limit" in str(error)
    assert time.monotonic() - began < 15


def test_a_grader_does_not_run_what_the_agent_left_in_its_home(arena: Arena) -> None:
    program = f"""
import subprocess, sys
from pathlib import Path
version = subprocess.run(["{SYSTEM_PYTHON}", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], capture_output=True, text=True).stdout.strip()
evil = "import atexit\\natexit.register(print, 1000000)\\n"
for home in ("/rollout/home", "/rollout/work", "/tmp"):
    for folder in ("", f".local/lib/python{{version}}/site-packages", ".ipython"):
        for name in ("usercustomize.py", "sitecustomize.py", ".pythonrc.py"):
            path = Path(home, folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(evil)
for name in (".profile", ".bashrc", ".shrc", ".bash_profile", ".gitconfig"):
    Path("/rollout/home", name).write_text("echo 1000000\\n")
"""
    grader = arena.folder / "grader"
    grader.mkdir()
    (grader / "grade.py").write_text("import json, os, sys\nprint(0.5)\n")
    outcome, _ = arena.play(program, f"{SYSTEM_PYTHON} {grader / 'grade.py'}")
    assert outcome.reward == 0.5


def test_the_score_command_has_nothing_of_the_agent_but_its_work(arena: Arena) -> None:
    """Neither its environment nor its home, /tmp, shared memory or network; the work itself cannot be changed."""
    program = """
from pathlib import Path
for folder in ("/rollout/home", "/tmp", "/dev/shm"):
    Path(folder, "left").touch()
Path("mine").touch()
"""
    score = (
        "set -e; test -f mine; touch new; test ! -e $HOME/left; test ! -e /tmp/left; test ! -e /dev/shm/left; "
        "! touch /rollout/submitted/x; ! rm /rollout/submitted/mine; ! touch $AGENT_LOG; env; "
        f"! {SYSTEM_PYTHON} -c 'import socket; socket.create_connection((\"127.0.0.1\", {arena.gateway}), 1)'; "
        f"! {SYSTEM_PYTHON} -c 'import socket; socket.create_connection((\"127.0.0.1\", 47321), 1)'; echo 0.75"
    )
    outcome, transcript = arena.play(program, score, env={"OF_AGENT": "1"})
    shown = transcript.partition("== score.log")[2]
    assert outcome.reward == 0.75, transcript
    assert "OF_AGENT" not in shown and "API_KEY" not in shown and "TOKENTRUE" not in shown


@pytest.mark.parametrize("trick", ["os.symlink(ARENA_SECRET, name)", "os.mkfifo(name)", "os.mkdir(name)", "None"])
def test_a_harbor_reward_is_a_small_regular_file(arena: Arena, trick: str) -> None:
    """The tests run the agent's code, which puts something else in the place of the reward."""
    (arena.victim / "secret.txt").write_text("1000000")
    task = arena.folder / "harbor" / "hello"
    (task / "tests").mkdir(parents=True)
    (task / "task.toml").write_text("[agent]\ntimeout_sec = 20\n")
    (task / "instruction.md").write_text("hello")
    (task / "tests" / "test.sh").write_text("sh /app/solution.sh\n")
    program = f"""
secret = ARENA["victim"] + "/secret.txt"
code = '''
import os
name = "/logs/verifier/reward.txt"
ARENA_SECRET = %r
for change in (lambda: os.rename("/logs/verifier", "/logs/old"), lambda: os.symlink(os.path.dirname(ARENA_SECRET), "/logs/verifier")):
    try:
        change()
        print("CHANGED")
    except OSError:
        pass
{trick}
''' % secret
open("solution.sh", "w").write("{SYSTEM_PYTHON} - <<'EOF'\\n" + code + "\\nEOF\\n")
"""
    with pytest.raises(AgentError, match="wrote no number"):
        arena.play(program, tasks=str(task.parent))
    assert "CHANGED" not in arena.transcript
    (arena.victim / "secret.txt").write_text(SECRET)


def test_what_outlives_the_agent_changes_nothing(arena: Arena) -> None:
    """Processes in sessions of their own, orphaned twice, ignore every signal and wait for the score command."""
    program = """
import os, signal, subprocess, sys, time
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for number in range(1, 32):
                if number not in (signal.SIGKILL, signal.SIGSTOP):
                    signal.signal(number, signal.SIG_IGN)
            for handle in range(3):
                os.close(handle)
            time.sleep(1)
            for _ in range(300):
                open("/rollout/work/a.txt", "w").write("1")
                time.sleep(0.01)
            os.execvp("sleep", ["sleep", "4721"])
        os._exit(0)
subprocess.Popen(["setsid", "sleep", "4721"])
"""
    outcome, _ = arena.play(program, "sleep 2; test -f a.txt")
    assert outcome.reward == 0.0 and processes_named("4721") == []


# Escapes


def test_the_kernel_refuses_what_a_sandbox_is_left_by(arena: Arena) -> None:
    """Mounts, roots, namespaces, devices, other users, kernel settings."""
    program = """
import ctypes, os, stat, subprocess
libc = ctypes.CDLL(None, use_errno=True)
MS_REMOUNT, MS_BIND, MS_REC = 32, 4096, 16384
def attempt(name, call):
    try:
        result = call()
    except OSError as error:
        print("refused", name, error.errno)
        return
    print("refused" if result == -1 else "DONE", name)
for path in (b"/", b"/usr", b"/etc", b"/proc", b"/dev", b"/run/gateway"):
    attempt(f"remount {path}", lambda: libc.mount(None, path, None, MS_REMOUNT | MS_BIND, None))
attempt("bind", lambda: libc.mount(b"/rollout/work", b"/rollout/home", None, MS_BIND | MS_REC, None))
attempt("tmpfs", lambda: libc.mount(b"t", b"/tmp", b"tmpfs", 0, None))
attempt("umount", lambda: libc.umount2(b"/usr", 2))
attempt("pivot", lambda: libc.syscall(41 if os.uname().machine == "aarch64" else 155, b"/tmp", b"/tmp"))
attempt("chroot", lambda: os.chroot("/tmp"))
for kind in (0x10000000, 0x00020000, 0x40000000, 0x20000000):
    attempt(f"unshare {kind:x}", lambda: libc.unshare(kind))
for space in ("user", "mnt", "net", "pid"):
    attempt(f"setns {space}", lambda: libc.setns(os.open(f"/proc/1/ns/{space}", os.O_RDONLY), 0))
attempt("block device", lambda: os.mknod("disk", 0o600 | stat.S_IFBLK, os.makedev(8, 0)))
attempt("char device", lambda: os.mknod("mem", 0o600 | stat.S_IFCHR, os.makedev(1, 1)))
for number in (0, 1):
    if os.getuid() != number:
        attempt(f"setuid {number}", lambda: os.setresuid(number, number, number))
attempt("hostname", lambda: libc.sethostname(b"x", 1))
for path in ("/proc/sys/kernel/core_pattern", "/proc/sys/vm/overcommit_memory", "/proc/sysrq-trigger", "/usr/x", "/etc/x",
             "/x", "/run/x", "/var/x", "/dev/x", "/rollout/x", "/root/x", "/home/x", "/opt/x", "/proc/1/oom_score_adj"):
    attempt(path, lambda: os.close(os.open(path, os.O_WRONLY | os.O_CREAT)) if "oom" not in path else os.write(os.open(path, os.O_WRONLY), b"-1000"))
for path in ("/etc/shadow", "/dev/mem", "/dev/sda", "/dev/vda", "/proc/kcore", "/proc/kmsg", "/dev/kmsg"):
    attempt(path, lambda: os.close(os.open(path, os.O_RDONLY)))
os.system("cp /bin/sh shell; chmod 6755 shell; ./shell -c 'id -u' >id.txt; sudo -n true; su -c true; mount")
"""
    outcome, transcript = arena.play(program, "cat id.txt")
    assert "DONE" not in transcript, transcript
    assert transcript.count("refused") > 35, transcript
    assert outcome.reward == (65534 if os.geteuid() == 0 else os.geteuid()), (
        "a setuid shell of one's own changes nothing"
    )


def test_no_process_file_or_key_of_the_host_can_be_seen(arena: Arena) -> None:
    other = arena.folder / "rollouts" / "tokentrue-rollout-other" / "agent" / "work"
    other.mkdir(parents=True)
    (other / "theirs.txt").write_text(SECRET)
    program = """
import os, subprocess
from pathlib import Path
print("processes", sum(name.isdigit() for name in os.listdir("/proc")))
for path in (ARENA["folder"] + "/victim", ARENA["folder"] + "/rollouts", ARENA["folder"] + "/transcripts", "/var/lib", "/sys", "/mnt",
             f"/proc/{ARENA['pid']}/environ", f"/proc/{ARENA['pid']}/root", "/proc/1/root" + ARENA["victim"],
             "/proc/1/cwd/../.." + ARENA["victim"], "/run/dbus", "/run/user", "/run/docker.sock"):
    if os.path.exists(path) and path != f"/proc/{os.getpid()}/environ":
        print("SEEN", path, os.listdir(path) if os.path.isdir(path) else "")
for entry in Path("/proc").iterdir():
    if entry.name.isdigit():
        for name in ("environ", "cmdline"):
            try:
                print((entry / name).read_bytes())
            except OSError:
                pass
        try:
            for handle in (entry / "fd").iterdir():
                print(entry.name, handle.name, os.readlink(handle))
                if os.path.isdir(handle):
                    print("SEEN directory", os.listdir(handle))
        except OSError:
            pass
print(sorted(os.environ))
subprocess.run(["keyctl", "show"], check=False) if os.path.exists("/usr/bin/keyctl") else None
subprocess.run(["grep", "-rls", "the-secret-0452", "/rollout", "/tmp", "/run", "/var", "/home"])
"""
    _, transcript = arena.play(program)
    assert "SEEN" not in transcript, transcript
    assert int(transcript.split("processes ")[1].split()[0]) < 8
    shutil.rmtree(arena.folder / "rollouts" / "tokentrue-rollout-other")


def test_no_process_of_the_host_can_be_signalled_or_traced(arena: Arena) -> None:
    """Then it kills all that it can, the parents of the agent included."""
    program = """
import ctypes, os, signal
libc = ctypes.CDLL(None, use_errno=True)
for pid in (ARENA["pid"], os.getppid() + 10000):
    try:
        os.kill(pid, signal.SIGKILL)
        print("KILLED", pid)
    except OSError as error:
        print("refused", error.errno)
    print("TRACED" if libc.ptrace(16, pid, 0, 0) != -1 else "refused")
open("a.txt", "w").close()
os.kill(-1, signal.SIGKILL)
for pid in (os.getppid(), 1):
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass
"""
    outcome, transcript = arena.play(program, "test -f a.txt")
    assert outcome.reward == 1.0 and transcript.count("refused") == 4
    assert "KILLED" not in transcript and "TRACED" not in transcript


def test_the_gateway_is_the_only_network(arena: Arena) -> None:
    program = """
import os, socket, urllib.request
print("gateway", urllib.request.urlopen(os.environ["OPENAI_BASE_URL"] + "/models", timeout=5).read())
def attempt(name, family, address):
    try:
        with socket.socket(family) as made:
            made.settimeout(2)
            made.connect(address)
        print("REACHED", name)
    except OSError as error:
        print("refused", name, error)
attempt("other port", socket.AF_INET, ("127.0.0.1", ARENA["other"]))
attempt("gateway's own port", socket.AF_INET, ("127.0.0.1", ARENA["gateway"]))
attempt("abroad", socket.AF_INET, ("1.1.1.1", 53))
attempt("private", socket.AF_INET, ("10.0.0.1", 80))
attempt("metadata", socket.AF_INET, ("169.254.169.254", 80))
attempt("ipv6", socket.AF_INET6, ("::1", ARENA["other"]))
attempt("abstract", socket.AF_UNIX, "\\0" + ARENA["abstract"])
attempt("the bridge's own socket", socket.AF_UNIX, "/run/gateway/socket")
for name in ("/var/run/docker.sock", "/run/docker.sock", "/run/dbus/system_bus_socket", "/tmp/.X11-unix/X0"):
    attempt(name, socket.AF_UNIX, name)
try:
    socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)
    print("REACHED raw")
except OSError:
    print("refused raw")
"""
    _, transcript = arena.play(program)
    assert "gateway b'ok'" in transcript and "REACHED" not in transcript and transcript.count("\nrefused ") == 13, (
        transcript
    )
    assert set(arena.contacts) == {arena.gateway}


def test_more_network_where_the_task_asks_for_it(arena: Arena) -> None:
    arena.write_task(network="host")
    program = """
import socket
socket.create_connection(("127.0.0.1", ARENA["other"]), 5).close()
"""
    outcome, _ = arena.play(program)
    assert outcome.reward == 1.0 and arena.other in arena.contacts
    arena.contacts.clear()


def test_many_connections_cost_the_host_few(arena: Arena) -> None:
    program = """
import os, socket, time, urllib.request
held = []
for _ in range(600):
    held.append(socket.create_connection(("127.0.0.1", 47321), 5))
for one in held:
    one.close()
for _ in range(50):
    try:
        print(urllib.request.urlopen(os.environ["OPENAI_BASE_URL"] + "/models", timeout=20).read())
        break
    except OSError:
        time.sleep(0.2)
"""
    before = len(os.listdir("/proc/self/fd"))
    outcome, transcript = arena.play(program)
    assert "b'ok'" in transcript and outcome.reward == 1.0
    assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_the_users_repository_cannot_be_written(arena: Arena) -> None:
    """Hooks, settings, references and objects of a checkout are the agent's own; the borrowed objects are read-only."""
    repository = arena.folder / "repo"
    evil = arena.folder / "evil"
    for command in ("init -q", "config user.email a@b", "config user.name n", "add .", "commit -q -m one"):
        subprocess.run(["git", "-C", str(repository), *command.split()], check=True)
    arena.write_task(ref="HEAD")
    before = {path: path.read_bytes() for path in repository.rglob("*") if path.is_file()}
    program = f"""
import os, subprocess
from pathlib import Path
print(subprocess.run(["git", "log", "--oneline"], capture_output=True, text=True).stdout)
alternate = Path(Path(".git/objects/info/alternates").read_text().strip())
for git in (Path(".git"), alternate.parent):
    for name in ("hooks/post-checkout", "hooks/pre-commit", "hooks/post-index-change"):
        try:
            (git / "hooks").mkdir(exist_ok=True)
            (git / name).write_text("#!/bin/sh\\ntouch {evil}\\n")
            (git / name).chmod(0o755)
        except OSError:
            pass
    try:
        with open(git / "config", "a") as config:
            config.write('[core]\\nfsmonitor = "touch {evil}; false"\\nhooksPath = {arena.folder}/hooks\\n[alias]\\nstatus = "!touch {evil}"\\n')
    except OSError:
        pass
for path in alternate.rglob("*"):
    try:
        path.chmod(0o777)
        path.write_bytes(b"x") if path.is_file() else None
        print("WRITTEN", path)
    except OSError:
        pass
"""
    outcome, transcript = arena.play(program, "test -f sum.txt")
    assert outcome.reward == 1.0 and " one" in transcript and "WRITTEN" not in transcript
    assert {path: path.read_bytes() for path in repository.rglob("*") if path.is_file()} == before
    subprocess.run(["git", "-C", str(repository), "status"], check=True, capture_output=True)
    assert not evil.exists()


# Limits


def test_a_fork_bomb_ends_with_its_time(arena: Arena) -> None:
    program = """
import os, time
while True:
    try:
        if os.fork() == 0:
            os.setsid()
    except OSError as error:
        if os.getpid() < 30:
            print(error, flush=True)
        time.sleep(0.2)
"""
    began = time.monotonic()
    outcome, transcript = arena.play(program, "echo 0.5", processes=60, agent_timeout_s=2)
    assert time.monotonic() - began < 30
    assert outcome.reward == 0.5 and outcome.note == "its time limit ended the agent"
    assert "Resource temporarily unavailable" in transcript and processes_named(f"{arena.folder}/agent") == []


def test_memory_processes_and_files_have_limits(arena: Arena) -> None:
    """The kernel refuses, and the agent says so in its output."""
    cases: dict[str, tuple[str, dict[str, Any]]] = {
        "bytearray(b'x') * (1 << 30)": ("MemoryError", {"memory_mib": 256}),
        "open('big', 'wb').write(bytes(30 << 20))": ("File too large", {"file_mib": 8}),
        "import threading; [threading.Thread(target=threading.Event().wait, daemon=True).start() for _ in range(99)]": (
            "can't start new thread",
            {"processes": 30},
        ),
    }
    for program, (printed, limits) in cases.items():
        outcome, transcript = arena.play(program, **limits)
        assert outcome.reward == 1.0 and printed in transcript, (program, outcome, transcript[-300:])


def test_of_endless_output_the_first_part_is_kept(arena: Arena) -> None:
    outcome, transcript = arena.play("while True: print('x' * 65536)", output_mib=1, agent_timeout_s=2)
    assert outcome.note == "its time limit ended the agent" and 1 << 20 <= len(transcript) < 2 << 20


def test_shared_memory_is_small(arena: Arena) -> None:
    program = """
try:
    with open("/dev/shm/x", "wb") as out:
        for _ in range(1024):
            out.write(bytes(1 << 20))
    print("FILLED")
except OSError as error:
    print(error)
"""
    _, transcript = arena.play(program)
    assert "No space left on device" in transcript and "FILLED" not in transcript


def test_a_grader_has_a_time_limit_too(arena: Arena) -> None:
    with pytest.raises(AgentError, match="took longer than its time limit"):
        arena.play("", "sleep 60", score_timeout_s=1)


def test_an_agent_that_ignores_its_end_is_ended(arena: Arena) -> None:
    """What it had printed is in the transcript."""
    program = """
import os, signal, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
print("so far")
open("a.txt", "w").close()
time.sleep(600)
"""
    began = time.monotonic()
    outcome, transcript = arena.play(program, "test -f a.txt", agent_timeout_s=1)
    assert time.monotonic() - began < 20 and "so far" in transcript
    assert outcome.reward == 1.0 and outcome.note == "its time limit ended the agent"


def test_any_bytes_may_be_printed(arena: Arena) -> None:
    program = r"""
import sys
sys.stdout.buffer.write(b"\xff\xfe\x00\x1b]0;title\x07\xed\xa0\x80" + bytes(range(256)) * 10 + "\u2028".encode())
"""
    outcome, _ = arena.play(program, r"printf '\377\376\n0.5'")
    assert outcome.reward == 0.5


def test_no_tree_is_too_deep_or_too_closed_to_be_removed(arena: Arena) -> None:
    """Deeper than Python recurses and than a path may be long; without permissions; with odd names."""
    program = """
import os
for name in ("-rf", "--help", "a\\nb", "$(touch x)", "\\udcff", " "):
    os.mkdir(name)
    open(os.path.join(name, name), "w").close()
os.mkdir("closed"); os.mkdir("closed/in"); os.chmod("closed/in", 0); os.chmod("closed", 0)
os.chdir("/rollout/home")
for _ in range(1100):
    os.mkdir("deeper")
    os.chdir("deeper")
"""
    outcome, _ = arena.play(program, "true")
    assert outcome.reward == 0.0, "work that cannot be read cannot be scored"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(os.geteuid() != 0, reason="this user is no root")
def test_as_an_unprivileged_user() -> None:
    """With this Python in sight of that user, wherever it lies."""
    top = Path(__file__).parents[2]
    prefixes = dict.fromkeys(map(os.path.realpath, (sys.base_prefix, sys.prefix)))  # .venv may be a link
    shown = [part for prefix in prefixes for part in ("--ro-bind", prefix, prefix)]
    parents = [part for path in reversed(Path(sys.base_prefix).parents[:-2]) for part in ("--dir", str(path))]
    enter = ["bwrap", "--dev-bind", "/", "/", "--tmpfs", "/root", *parents, *shown, "--"]
    enter += [
        "setpriv",
        "--reuid",
        "65534",
        "--regid",
        "65534",
        "--clear-groups",
        "--inh-caps=-all",
        "--bounding-set=-all",
    ]
    base = Path(tempfile.gettempdir()) / f"unprivileged-{os.getpid()}"
    base.mkdir()
    os.chown(base, 65534, 65534)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--basetemp={base / 'p'}",
        str(Path(__file__)),
    ]
    environment = {**os.environ, "PYTHONPATH": str(top), "PYTHONDONTWRITEBYTECODE": "1", "HOME": str(base)}
    try:
        done = subprocess.run([*enter, *command], cwd=top, env=environment, capture_output=True, text=True, timeout=500)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    assert done.returncode == 0 and "skipped" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]
    assert " 1 skipped" in done.stdout.splitlines()[-1], "this test alone"
