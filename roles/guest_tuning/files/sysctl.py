"""Kernel settings that run now: `look` compares, `apply` sets and records what was there, `restore` puts that back.

Arguments: the action, and a JSON object {values: {name: value}, record: path}. Prints {changed: {name: [old, new]}}.
"""

import json
import os
import sys


def place(name):
    """As sysctl(8) reads names: the first separator divides, and the other one stands for it within a part, as in
    net.ipv4.conf.enp3s0/200.forwarding."""
    divided = "/" in name.split(".", 1)[0]
    return "/proc/sys/" + (name if divided else name.translate(str.maketrans("./", "/.")))


def read(name):
    try:
        with open(place(name), encoding="ascii") as source:
            return " ".join(source.read().split())
    except OSError:
        return None  # this kernel has no such setting


def write(name, value):
    with open(place(name), "w", encoding="ascii") as target:
        target.write(value + "\n")


def load(path):
    try:
        with open(path, encoding="utf-8") as source:
            return json.load(source)
    except FileNotFoundError:
        return {}


def save(path, values):
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    with open(os.open(path + ".new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as target:
        json.dump(values, target, sort_keys=True)
        target.flush()
        os.fsync(target.fileno())
    os.replace(path + ".new", path)


def main():
    action, asked = sys.argv[1], json.loads(sys.argv[2])
    before = load(asked["record"])
    wanted = {name: " ".join(str(value).split()) for name, value in asked["values"].items()}
    if action == "restore":
        wanted = before
    else:  # what is no longer asked for goes back to what it was
        wanted = {**before, **wanted}
    now = {name: read(name) for name in wanted}
    changed = {name: [now[name], value] for name, value in wanted.items() if now[name] not in (None, value)}
    if action == "apply":
        kept = {name: before.get(name, now[name]) for name in asked["values"] if now[name] is not None}
        if kept != before:
            save(asked["record"], {**before, **kept})
    if action != "look":
        for name, (_, value) in changed.items():
            write(name, value)
    if action == "apply" and kept != before:
        save(asked["record"], kept)
    if action == "restore" and os.path.exists(asked["record"]):
        os.unlink(asked["record"])
    print(json.dumps({"changed": changed}))


main()
