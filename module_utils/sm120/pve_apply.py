"""Read, plan, refuse or write, until nothing is left to write."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from .pve_client import Client, PveError, TaskFailed
from .pve_facts import Facts, collect, collect_cluster, reread, running_tasks
from .pve_finding import Finding, errors, render
from .pve_plan import Plan, Step, make_plan, read_privileges
from .pve_preflight import check_cluster, check_privileges
from .pve_spec import VmSpec
from .pve_validate import static_address, validate

__all__ = ["Outcome", "Refused", "run"]

# Create, then mend what creation cannot do (grow, root's options); a third round would be a bug.
MAX_ROUNDS = 3
ADDRESS_POLL_SECONDS = 2.0


class Refused(Exception):
    """Checks forbid the plan."""

    def __init__(self, findings: list[Finding]) -> None:
        super().__init__(render(errors(findings)))
        self.findings = findings


@dataclass
class Outcome:
    """What was found and done."""

    changed: bool = False
    findings: list[Finding] = field(default_factory=list)
    before: dict[str, str] = field(default_factory=dict)
    after: dict[str, str] = field(default_factory=dict)
    created: bool = False
    restart_required: bool = False
    root_set: dict[str, str] = field(default_factory=dict)
    root_delete: list[str] = field(default_factory=list)
    vm: dict[str, Any] = field(default_factory=dict)


def _read(client: Client, spec: VmSpec, *, asks_agent: bool) -> Facts:
    auth = client.auth
    facts = collect_cluster(client, is_root=auth.is_root, caller=auth.label, user=auth.user)
    needed = read_privileges(spec, facts, asks_agent=asks_agent)
    findings = [*check_cluster(spec, facts), *check_privileges(facts, needed)]
    if findings:
        raise Refused(findings)
    for upid in running_tasks(client, spec, facts):
        # Left by a run that lost its connection: what it ends with shows in what is read next.
        with suppress(TaskFailed):
            client.wait(upid, spec.task_timeout_seconds)
    collect(client, spec, facts)
    return facts


def _carry_out(client: Client, steps: list[Step]) -> None:
    for step in steps:
        answer = client.request(step.method, step.path, step.params or None)
        if step.wait_seconds is not None and isinstance(answer, str) and answer.startswith("UPID:"):
            client.wait(answer, step.wait_seconds)


def _merge(outcome: Outcome, plan: Plan) -> None:
    for key, value in plan.before.items():
        outcome.before.setdefault(key, value)
    outcome.after.update(plan.after)


def run(client: Client, spec: VmSpec, *, check_mode: bool, address_timeout_seconds: float = 0) -> Outcome:
    """Bring the VM to the state asked for; in check mode say what would be done."""
    problems = validate(spec)
    if problems:
        raise Refused(problems)
    asks_agent = (
        address_timeout_seconds > 0
        and spec.state == "started"
        and spec.agent
        and static_address(spec.ipconfig) is None
    )
    facts = _read(client, spec, asks_agent=asks_agent)
    outcome = Outcome(created=spec.wants_vm and facts.vm is None)
    for _ in range(MAX_ROUNDS):
        plan = make_plan(spec, facts)
        outcome.findings = plan.findings
        if plan.refused:
            raise Refused(plan.findings)
        outcome.changed = outcome.changed or bool(plan.steps or plan.root_set or plan.root_delete)
        _merge(outcome, plan)
        if check_mode or not plan.steps:
            break
        _carry_out(client, plan.steps if plan.first is None else plan.first)
        facts.created = outcome.created
        if plan.first is None:
            reread(client, spec, facts)
            break
        collect(client, spec, facts)
    else:
        left = ", ".join(f"{step.method} {step.path}" for step in make_plan(spec, facts).steps)
        if left:
            raise PveError(
                f"the VM's configuration does not settle; still to do after {MAX_ROUNDS} rounds: {left}"
            )
    _finish(spec, facts, plan, outcome, check_mode=check_mode)
    if asks_agent and not check_mode and facts.vm is not None and facts.vm.running:
        outcome.vm["address"] = _address(client, spec, address_timeout_seconds)
    return outcome


def _finish(spec: VmSpec, facts: Facts, plan: Plan, outcome: Outcome, *, check_mode: bool) -> None:
    outcome.root_set, outcome.root_delete = plan.root_set, plan.root_delete
    if not spec.wants_vm and not check_mode and facts.resource(spec.vmid) is not None:
        raise PveError(f"VM {spec.vmid} is still there after it was destroyed")
    pending = () if facts.vm is None else facts.vm.pending
    running = facts.vm is not None and facts.vm.running
    outcome.restart_required = plan.restart_required if check_mode else bool(running and pending)
    outcome.vm = {
        "vmid": spec.vmid,
        "name": spec.name,
        "node": spec.node,
        "status": "absent" if facts.vm is None else facts.vm.status,
        "pending": list(pending),
        "address": static_address(spec.ipconfig) if spec.wants_vm else None,
    }


def _address(client: Client, spec: VmSpec, timeout_seconds: float) -> str | None:
    """The first address that the guest agent tells."""
    deadline = time.monotonic() + timeout_seconds
    path = f"/nodes/{spec.node}/qemu/{spec.vmid}/agent/network-get-interfaces"
    while True:
        try:
            for interface in (client.get(path) or {}).get("result") or []:
                for item in interface.get("ip-addresses") or []:
                    text = str(item.get("ip-address", ""))
                    if interface.get("name") != "lo" and text and not text.startswith(("fe80:", "127.")):
                        return text
        except PveError as problem:  # 500 until the agent answers
            if problem.status in {401, 403, 501}:
                raise
        if time.monotonic() > deadline:
            return None
        time.sleep(ADDRESS_POLL_SECONDS)
