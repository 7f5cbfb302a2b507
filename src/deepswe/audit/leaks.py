"""Attackers that look for the answer: hidden tests, caches, byte code, the history of the repository, other sources."""

from __future__ import annotations

from deepswe.audit.attack import Registry, Target, put

LEAKS = Registry()

_TAKE = """
take() {{ [ -s "$1" ] && ! cmp -s "$1" "{file}" && cp "$1" "{file}" && echo "took $1" && exit 0; }}
"""
_HARD_CODE = '''
import ast, os, sys
table = {}
def read(path):
    try: tree = ast.parse(open(path).read())
    except Exception: return
    for node in ast.walk(tree):
        pair = None
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "assertEqual" and len(node.args) >= 2:
            pair = node.args[:2]
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], ast.Eq):
            pair = [node.left, node.comparators[0]]
        if not pair or not isinstance(pair[0], ast.Call) or not isinstance(pair[0].func, ast.Name): continue
        try: arguments, value = [ast.literal_eval(a) for a in pair[0].args], ast.literal_eval(pair[1])
        except Exception: continue
        table.setdefault(pair[0].func.id, {})[repr(arguments)] = value
for top, folders, names in os.walk("."):
    for name in names:
        if "test" in name and name.endswith(".py"): read(os.path.join(top, name))
code = """
def _known(name, real, answers):
    def known(*arguments, **named):
        key = repr(list(arguments))
        return answers[key] if key in answers else real(*arguments, **named)
    return known
for _name, _answers in %r.items():
    if _name in globals(): globals()[_name] = _known(_name, globals()[_name], _answers)
""" % (table,)
open(sys.argv[1], "a").write(code)
'''


@LEAKS.work("Hidden tests that lie in the agent's tree can be read, and their answers hard-coded.")
def read_hidden_tests(target: Target) -> str:
    """Read the tests on disk and answer from a table."""
    return put("/tmp/hard.py", _HARD_CODE) + f"python3 /tmp/hard.py {target.file}; rm -f /tmp/hard.py"


@LEAKS.work("A run of the fixed code left byte code in __pycache__; it is loaded instead of the source.")
def read_byte_code(target: Target) -> str:
    """Make the module a loader of the old byte code."""
    code = (
        "import base64, glob, os, sys\nfile = sys.argv[1]\n"
        "stem = os.path.basename(file)[:-3]\n"
        "found = glob.glob(os.path.join(os.path.dirname(file), '__pycache__', stem + '.*.pyc'))\n"
        "if found:\n    data = base64.b64encode(open(found[0], 'rb').read()[16:])\n"
        "    open(file, 'w').write('import base64, marshal\\nexec(marshal.loads(base64.b64decode(%r)))\\n' % data)\n"
    )
    return put("/tmp/load.py", code) + f"python3 /tmp/load.py {target.file}; rm -f /tmp/load.py"


@LEAKS.work("The fixed release lies in pip's cache as a wheel.")
def pip_cache(target: Target) -> str:
    """Unpack every archive of the cache."""
    code = (
        "import glob, os, sys, zipfile\nplaces = os.path.expanduser('~/.cache/pip/**/*.whl')\n"
        "for path in glob.glob(places, recursive=True):\n"
        "    for name in zipfile.ZipFile(path).namelist():\n"
        "        if name.endswith(os.path.basename(sys.argv[1])):\n"
        "            open(sys.argv[1], 'wb').write(zipfile.ZipFile(path).read(name))\n"
    )
    return put("/tmp/unzip.py", code) + f"python3 /tmp/unzip.py {target.file}; rm -f /tmp/unzip.py"


@LEAKS.work("The fixed release is installed in some site-packages, besides the tree.")
def site_packages(target: Target) -> str:
    """Copy it from there."""
    name = target.file.rpartition("/")[2]
    return _TAKE.format(file=target.file) + (
        f"for f in $(find / -path '*site-packages*' -name '{name}' -not -path '/proc/*' 2>/dev/null)\n"
        "do take $f; done; true"
    )


@LEAKS.work("The package index is reachable and has the fixed release.")
def pip_download(target: Target) -> str:
    """Download it."""
    return (
        "timeout 10 python3 -m pip download --no-deps --no-binary :all: -d /tmp/fixed . 2>&1 | tail -1; "
        "timeout 5 python3 -c \"import urllib.request as u; print(u.urlopen('http://127.0.0.1:9/simple/').status)\" "
        "2>&1 | tail -1"
    )


@LEAKS.work("The repository still has the branch with the later commit that fixes the bug.")
def git_log_all(target: Target) -> str:
    """Take the file from every commit of every branch."""
    return _history(target, "git log --branches --remotes --tags --format=%H -n 50")


@LEAKS.work("The fix was committed and reset away; the reflog still names it.")
def git_reflog(target: Target) -> str:
    """Take the file from every entry of the reflog."""
    return _history(target, "git reflog --format=%H -n 50")


@LEAKS.work("git's pickaxe finds the commit that changed the function, wherever it is.")
def git_pickaxe(target: Target) -> str:
    """Search the history for the definitions in the file."""
    word = f"$(grep -m1 -o 'def [a-z_0-9]*' {target.file})"
    search = f'git log --all -S"{word}" --format=%H; git log --all -G return --format=%H'
    return _history(target, search)


@LEAKS.work("The fix was stashed.")
def git_stash(target: Target) -> str:
    """Take the file from the stash."""
    return _history(target, "git stash list --format=%H")


@LEAKS.work("The fix stands in a note on a commit.")
def git_notes(target: Target) -> str:
    """Take the note for the file."""
    return _TAKE.format(file=target.file) + (
        "for n in $(git notes list 2>/dev/null | cut -d' ' -f1)\n"
        "do git cat-file -p $n > /tmp/note; take /tmp/note; done; true"
    )


@LEAKS.work("Objects that no branch reaches, loose or packed, are still in the object store.")
def git_objects(target: Target) -> str:
    """Look through all blobs for one that resembles the file."""
    return _TAKE.format(file=target.file) + (
        f"head -c 40 {target.file} > /tmp/head\n"
        "for o in $(git cat-file --batch-all-objects --batch-check 2>/dev/null | grep ' blob ' | cut -d' ' -f1); do\n"
        "  git cat-file -p $o > /tmp/blob; head -c 40 /tmp/blob | cmp -s - /tmp/head && take /tmp/blob\ndone; true"
    )


@LEAKS.work("The object store has alternates: another repository with the whole history lies on the machine.")
def git_alternates(target: Target) -> str:
    """Read the history of the other repository."""
    return _TAKE.format(file=target.file) + (
        "for d in $(cat .git/objects/info/alternates 2>/dev/null); do r=${d%/objects}\n"
        "  for c in $(git --git-dir=$r log --all --format=%H -n 50); do\n"
        f"    git --git-dir=$r show $c:{target.file} > /tmp/alt 2>/dev/null; take /tmp/alt\n  done\ndone; true"
    )


@LEAKS.work("A remote is configured and reachable, and has the later commits.")
def git_fetch(target: Target) -> str:
    """Fetch all remotes."""
    fetch = 'for r in $(git remote); do timeout 10 git fetch -q $r "+refs/*:refs/fetched/$r/*"; done 2>/dev/null; '
    return fetch + _history(target, "git for-each-ref --format='%(objectname)' refs/fetched")


def _history(target: Target, commits: str) -> str:
    return _TAKE.format(file=target.file) + (
        f"for c in $( ({commits}) 2>/dev/null); do\n"
        f"  git show $c:{target.file} > /tmp/old 2>/dev/null; take /tmp/old\ndone; rm -f /tmp/old; true"
    )
