"""The made-up Proxmox VE node over HTTPS, with a record of requests and faults on demand."""

from __future__ import annotations

import json
import re
import ssl
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from pve_state import GIB, NODE, PRIVILEGES, ApiError, Caller, Machine, State, properties

TOKEN, SECRET = "ansible@pve!gpu", "11111111-2222-3333-4444-555555555555"
PASSWORD = "correct horse"


@dataclass
class Fault:
    """What happens to the next ``times`` requests that match."""

    method: str
    path: str
    status: int | None = None  # None: the connection is cut
    message: str = "made-up failure"
    after: bool = False  # cut after the work was done
    times: int = 1


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1, made by openssl."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
    ]
    command += ["-days", "2", "-subj", "/CN=pve1", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)
    return cert, key


class Stub:
    """A server around a State."""

    def __init__(self, cert: Path, key: Path, port: int = 0) -> None:
        self.state = State()
        self.requests: list[tuple[str, str, dict[str, Any]]] = []
        self.faults: list[Fault] = []
        self.tokens = {TOKEN: SECRET, "root@pam!automation": SECRET}
        self.permissions: dict[str, dict[str, int]] = {"/": dict.fromkeys(PRIVILEGES, 1)}
        self._lock = threading.Lock()
        stub = self

        class Handler(_Handler):
            owner = stub

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert, key)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})

    def __enter__(self) -> Stub:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def writes(self) -> list[tuple[str, str, dict[str, Any]]]:
        """Requests that are neither reads nor logins."""
        return [item for item in self.requests if item[0] != "GET" and item[1] != "/access/ticket"]

    def caller(self, headers: Any) -> Caller:
        """Who it is, or 401."""
        name, _, secret = str(headers.get("Authorization", "")).removeprefix("PVEAPIToken=").partition("=")
        if self.tokens.get(name, "") == secret and secret:
            return Caller(name, False, self.permissions)
        if "PVEAuthCookie=PVE:root" in str(headers.get("Cookie", "")):
            return Caller("root@pam", True, {"/": dict.fromkeys(PRIVILEGES, 1)})
        raise ApiError(401, "authentication failure")

    def fault(self, method: str, path: str, *, after: bool) -> Fault | None:
        """The fault this request runs into."""
        for item in self.faults:
            if item.after == after and item.method == method and re.fullmatch(item.path, path) and item.times:
                item.times -= 1
                return item
        return None

    def answer(self, method: str, path: str, params: dict[str, Any], headers: Any) -> Any:
        """Route one request."""
        with self._lock:
            self.requests.append((method, path, params))
            if (method, path) == ("POST", "/access/ticket"):
                if params.get("password") != PASSWORD or params.get("username") != "root@pam":
                    raise ApiError(401, "authentication failure")
                return {"ticket": "PVE:root@pam:1", "CSRFPreventionToken": "1:csrf", "username": "root@pam"}
            caller = self.caller(headers)
            if caller.root and method != "GET" and headers.get("CSRFPreventionToken") != "1:csrf":
                raise ApiError(401, "Permission denied - invalid csrf token")
            for verb, pattern, route in ROUTES:
                match = re.fullmatch(pattern, path)
                if verb == method and match:
                    return route(self.state, caller, params, *[unquote(text) for text in match.groups()])
        raise ApiError(501, f"Method '{method} {path}' not implemented")


class _Handler(BaseHTTPRequestHandler):
    owner: Stub

    def log_message(self, *args: Any) -> None:
        """Say nothing: the record is kept by the stub."""

    def _serve(self) -> None:
        url = urlsplit(self.path)
        path = url.path.removeprefix("/api2/json")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        params: dict[str, Any] = {}
        for key, value in parse_qsl(url.query or body, keep_blank_values=True):
            params[key] = [*params.get(key, []), value] if key == "map" else value
        fault = self.owner.fault(self.command, path, after=False)
        if fault is not None and fault.status is None:
            self.close_connection = True
            return
        try:
            if fault is not None:
                raise ApiError(fault.status or 500, fault.message)
            status, answer = 200, {"data": self.owner.answer(self.command, path, params, self.headers)}
        except (KeyError, ValueError, IndexError, AttributeError, TypeError) as problem:
            status, answer = 400, {"data": None, "message": f"Parameter verification failed. {problem!r}\n"}
        except ApiError as problem:
            status, answer = problem.status, {"data": None, "message": problem.message + "\n"}
            if problem.errors:
                answer["errors"] = problem.errors
        if self.owner.fault(self.command, path, after=True) is not None:
            self.close_connection = True
            return
        raw = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    do_GET = do_POST = do_PUT = do_DELETE = _serve


def _vm(state: State, vmid: str, caller: Caller, *privileges: str) -> Machine:
    caller.need(f"/vms/{vmid}", *privileges or ("VM.Audit",))
    if int(vmid) not in state.vms:
        raise ApiError(500, f"Configuration file 'nodes/{NODE}/qemu-server/{vmid}.conf' does not exist")
    return state.vms[int(vmid)]


def _config_vm(state: State, vmid: str) -> Machine:
    """For a change, whose privileges are checked key by key."""
    return _vm(state, vmid, Caller("", True, {}))


def _unlocked(vm: Machine) -> None:
    if "lock" in vm.config:
        raise ApiError(500, f"VM is locked ({vm.config['lock']})")


def _resources(state: State, caller: Caller, *_: Any) -> list[dict[str, Any]]:
    base = {"type": "qemu", "node": NODE}
    ours = [
        {**base, "vmid": vmid, "status": vm.status, "name": vm.config.get("name", f"VM {vmid}")}
        | {key: vm.config[key] for key in ("lock", "template") if key in vm.config}
        for vmid, vm in state.vms.items()
        if caller.may(f"/vms/{vmid}", "VM.Audit")
    ]
    return ours + state.others


def _status(state: State, caller: Caller, *_: Any) -> dict[str, Any]:
    caller.need(f"/nodes/{NODE}", "Sys.Audit")
    total, free = state.memory_mib << 20, state.free_mib << 20
    memory = {"total": total, "used": total - free, "free": free, "available": free}
    return {"cpuinfo": {"cpus": state.cpus}, "memory": memory}


def _pci(state: State, caller: Caller, params: dict[str, Any], *_: Any) -> list[dict[str, Any]]:
    caller.need("/", "Sys.Audit")
    hidden = tuple(f"0x{item}" for item in params.get("pci-class-blacklist", "05;06;0b").split(";") if item)
    return [item for item in state.pci if not hidden or not item["class"].startswith(hidden)]


def _storages(state: State, caller: Caller, *_: Any) -> list[dict[str, Any]]:
    return [
        {"storage": name, "content": content, "active": 1, "avail": int(state.avail_gib * GIB)}
        for name, content in state.storages.items()
        if caller.may(f"/storage/{name}", "Datastore.Audit")
    ]


def _content(state: State, caller: Caller, _: Any, storage: str) -> list[dict[str, Any]]:
    caller.need(f"/storage/{storage}", "Datastore.Audit", "Datastore.AllocateSpace")
    return [{"volid": name, "size": int(size * GIB / 4)} for name, size in state.images.items()]


def _mappings(state: State, caller: Caller, params: dict[str, Any]) -> list[dict[str, Any]]:
    checked = "check-node" in params
    return [
        {**item, **({"checks": state.mapping_checks(item)} if checked else {})}
        for item in state.mappings.values()
        if caller.may(f"/mapping/pci/{item['id']}", "Mapping.Audit")
    ]


def _map(state: State, caller: Caller, params: dict[str, Any]) -> None:
    caller.need("/mapping/pci", "Mapping.Modify")
    if params["id"] in state.mappings:
        raise ApiError(500, f"mapping '{params['id']}' already exists")
    missing = {"node", "path", "id"} - properties(params["map"][0]).keys()
    if missing:
        raise ApiError(
            400, "Parameter verification failed.", {"map": f"missing property {sorted(missing)[0]}"}
        )
    problem = state.mapping_problem(params["id"], properties(params["map"][0]))
    if problem:
        raise ApiError(500, problem)
    state.mappings[params["id"]] = params


def _unmap(state: State, caller: Caller, _: Any, name: str) -> None:
    caller.need("/mapping/pci", "Mapping.Modify")
    del state.mappings[name]


def _create(state: State, caller: Caller, params: dict[str, Any]) -> str:
    vmid = int(params["vmid"])
    caller.need(f"/vms/{vmid}", "VM.Allocate")
    if vmid in state.vms:
        raise ApiError(500, f"unable to create VM {vmid} - VM {vmid} already exists on node '{NODE}'")
    state.check_keys(caller, params, vmid)
    state.vms[vmid] = Machine({"lock": "create"})

    def effect() -> None:
        state.apply(vmid, params)
        state.vms[vmid].config["smbios1"] = f"uuid=00000000-0000-0000-0000-{vmid:012d}"
        del state.vms[vmid].config["lock"]

    return state.task("qmcreate", vmid, caller.name, effect)


def _put_config(state: State, caller: Caller, params: dict[str, Any], vmid: str) -> None:
    vm = _config_vm(state, vmid)
    state.check_keys(caller, params, int(vmid))
    _unlocked(vm)
    if params.get("digest") not in (None, vm.digest()):
        raise ApiError(500, "detected modified configuration - file changed by other user? Try again.")
    state.apply(int(vmid), params)


def _config(state: State, caller: Caller, params: dict[str, Any], vmid: str) -> dict[str, str]:
    vm = _vm(state, vmid, caller)
    return {**(vm.config if params.get("current") == "1" else vm.merged()), "digest": vm.digest()}


def _pending(state: State, caller: Caller, _: Any, vmid: str) -> list[dict[str, Any]]:
    vm = _vm(state, vmid, caller)
    items = [{"key": key, "value": value} for key, value in vm.config.items() if key not in vm.pending]
    for key, value in vm.pending.items():
        items.append(
            {"key": key, "value": vm.config.get(key), **({"pending": value} if value else {"delete": 1})}
        )
    return items


def _power(state: State, caller: Caller, params: dict[str, Any], vmid: str, verb: str) -> str:
    vm = _vm(state, vmid, caller, "VM.PowerMgmt")
    _unlocked(vm)

    def effect() -> None:
        if verb == "start":
            state.start(int(vmid))
        else:
            vm.config, vm.pending, vm.status = vm.merged(), {}, "stopped"

    return state.task(f"qm{verb}", int(vmid), caller.name, effect)


def _resize(state: State, caller: Caller, params: dict[str, Any], vmid: str) -> str:
    vm, size = _vm(state, vmid, caller, "VM.Config.Disk"), params["size"]
    _unlocked(vm)
    if params["disk"] not in vm.config:
        raise ApiError(500, f"disk '{params['disk']}' does not exist")
    return state.task("resize", int(vmid), caller.name, lambda: state.resize(int(vmid), params["disk"], size))


def _destroy(state: State, caller: Caller, params: dict[str, Any], vmid: str) -> str:
    vm = _vm(state, vmid, caller, "VM.Allocate")
    _unlocked(vm)
    if vm.config.get("protection") == "1":
        raise ApiError(500, f"can't remove VM {vmid} - protection mode enabled")
    return state.task("qmdestroy", int(vmid), caller.name, lambda: state.destroy(int(vmid)))


def _download(state: State, caller: Caller, params: dict[str, Any], storage: str) -> str:
    caller.need(f"/storage/{storage}", "Datastore.AllocateTemplate")
    if not caller.may("/", "Sys.Modify"):
        caller.need(f"/nodes/{NODE}", "Sys.AccessNetwork")
    volume = f"{storage}:import/{params['filename']}"
    return state.task("download", 0, caller.name, lambda: state.images.update({volume: 3.5}))


def _active(state: State, _: Caller, params: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"upid": task.upid, "id": str(task.vmid), "type": task.kind}
        for task in state.tasks.values()
        if task.exitstatus is None and str(task.vmid) == str(params.get("vmid", task.vmid))
    ]


def _agent(state: State, caller: Caller, _: Any, vmid: str) -> dict[str, Any]:
    vm = _vm(state, vmid, caller, "VM.GuestAgent.Audit", "VM.GuestAgent.Unrestricted")
    if vm.status != "running" or not vm.addresses:
        raise ApiError(500, "QEMU guest agent is not running")
    found = {"lo": ["127.0.0.1"], "eth0": vm.addresses}
    return {
        "result": [
            {"name": name, "ip-addresses": [{"ip-address": text} for text in texts]}
            for name, texts in found.items()
        ]
    }


VM = rf"/nodes/{NODE}/qemu/(\d+)"
ROUTES: list[tuple[str, str, Callable[..., Any]]] = [
    ("GET", "/version", lambda s, *_: {"version": s.version}),
    ("GET", "/nodes", lambda *_: [{"node": NODE, "status": "online"}]),
    ("GET", "/access/permissions", lambda _, caller, *__: caller.permissions),
    ("GET", "/cluster/resources", _resources),
    ("GET", f"/nodes/{NODE}/status", _status),
    ("GET", f"/nodes/{NODE}/hardware/pci", _pci),
    ("GET", f"/nodes/{NODE}/storage", _storages),
    ("GET", f"/nodes/{NODE}/storage/([^/]+)/content", _content),
    ("POST", f"/nodes/{NODE}/storage/([^/]+)/download-url", _download),
    ("GET", "/cluster/mapping/pci", _mappings),
    ("POST", "/cluster/mapping/pci", _map),
    ("DELETE", "/cluster/mapping/pci/([^/]+)", _unmap),
    ("POST", f"/nodes/{NODE}/qemu", _create),
    ("GET", f"{VM}/config", _config),
    ("GET", f"{VM}/agent/network-get-interfaces", _agent),
    ("PUT", f"{VM}/config", _put_config),
    ("GET", f"{VM}/pending", _pending),
    ("GET", f"{VM}/status/current", lambda s, c, _, v: {"status": _vm(s, v, c).status}),
    ("POST", f"{VM}/status/(start|shutdown|stop)", _power),
    ("PUT", f"{VM}/resize", _resize),
    ("DELETE", VM, _destroy),
    ("GET", f"{VM}/snapshot", lambda s, c, _, v: [{"name": n} for n in [*_vm(s, v, c).snapshots, "current"]]),
    ("GET", f"/nodes/{NODE}/tasks", _active),
    ("GET", f"/nodes/{NODE}/tasks/([^/]+)/status", lambda s, _, __, upid: s.poll(upid)),
    (
        "GET",
        f"/nodes/{NODE}/tasks/([^/]+)/log",
        lambda s, _, __, upid: [{"n": n, "t": t} for n, t in enumerate(s.tasks[upid].log, 1)],
    ),
]
