#!/usr/bin/python
"""Create, change, start, stop and destroy a Proxmox VE virtual machine with GPUs passed through."""

from __future__ import annotations

DOCUMENTATION = r"""
module: pve_gpu_vm
short_description: A Proxmox VE virtual machine with GPUs passed through
description:
  - Brings one VM to the configuration asked for, by the Proxmox VE API, and writes only what differs.
  - Every check comes before the first write; a refusal names what was wanted, what was found and the fix.
  - Disks, MAC addresses, smbios and vmgenid are never made anew; disks are grown and never shrunk.
attributes:
  check_mode:
    support: full
    description: Makes no request that writes; the answer and the diff are the plan.
  diff_mode:
    support: full
    description: Shows the keys that differ, in canonical spelling.
options:
  api_host: {type: str, required: true, description: Address of the API.}
  api_port: {type: int, default: 8006, description: Its port.}
  api_user: {type: str, required: true, description: "User and realm, for example C(ansible@pve)."}
  api_token_id: {type: str, description: "Token, as C(NAME) or C(USER@REALM!NAME)."}
  api_token_secret:
    {type: str, description: "The token's secret; E(PVE_API_TOKEN_SECRET) by default."}
  api_token_secret_file: {type: path, description: File that holds the token's secret.}
  api_password:
    {type: str, description: "Password, in place of a token; E(PVE_API_PASSWORD) by default."}
  api_password_file: {type: path, description: File that holds the password.}
  validate_certs: {type: bool, default: true, description: Verify the API's certificate.}
  ca_path: {type: path, description: "CA to trust, for example a copy of /etc/pve/pve-root-ca.pem."}
  fingerprint: {type: str, description: SHA-256 of the certificate to trust in place of a CA.}
  request_timeout_seconds: {type: int, default: 30, description: Limit of one request in seconds.}
  node: {type: str, required: true, description: Node that runs the VM.}
  vmid: {type: int, required: true, description: "Number of the VM, 100 to 999999999."}
  name: {type: str, required: true, description: Name of the VM; a DNS name.}
  state:
    type: str
    choices: [present, started, stopped, absent]
    default: started
    description:
      - V(present) leaves the power alone; V(absent) destroys the VM and needs O(confirm_destroy).
  owner_id:
    {type: str, required: true, description: "Whose VM it is; its description must say so."}
  owner_tag: {type: str, default: sglang-sm120, description: "Tag of our VMs, required to be there."}
  description: {type: str, default: "", description: Text after the owner's line.}
  tags: {type: list, elements: str, default: [], description: Tags beside O(owner_tag).}
  gpus:
    type: list
    elements: dict
    default: []
    description: GPUs in the order in which the guest is to see them.
    suboptions:
      mapping: {type: str, required: true, description: Resource mapping.}
      path: {type: str, description: "PCI address the mapping must have, or gets when it is made."}
      pcie: {type: bool, default: true, description: Present it as a PCIe device.}
      rombar: {type: bool, default: true, description: Show its ROM to the guest.}
  gpu_ids:
    {type: list, elements: str, default: ["10de:2bb5", "10de:2bb1"], description: PCI ids of GPUs.}
  gpu_function:
    type: str
    choices: ["0", "all"]
    default: "0"
    description: Which functions of a card a mapping that is made holds.
  gpu_bar_mib: {type: int, default: 131168, description: Sum of the BARs of one GPU in MiB.}
  manage_mappings:
    {type: bool, default: false, description: "Make missing mappings; V(absent) removes this owner's."}
  accept_group_members:
    {type: bool, default: false, description: Go on when other devices share an IOMMU group with a GPU.}
  host_phys_bits: {type: int, description: "Physical address bits of the node's processor, when known."}
  guest_phys_bits: {type: int, description: "Limit of the guest's address bits (guest-phys-bits)."}
  sockets: {type: int, default: 1, description: Processor sockets.}
  cores: {type: int, description: "Cores of a socket; required unless O(state=absent)."}
  cpu: {type: str, default: "host,phys-bits=host", description: Model (must be host) and options.}
  memory_mib: {type: int, description: "Memory in MiB; required unless O(state=absent)."}
  numa: {type: bool, default: false, description: NUMA for the guest.}
  numa_nodes:
    type: list
    elements: dict
    default: []
    description: NUMA nodes of the guest.
    suboptions:
      cpus: {type: str, required: true, description: "Guest CPUs, for example C(0-31)."}
      memory_mib: {type: int, required: true, description: Memory of the node in MiB.}
      hostnodes: {type: str, description: Node of the host.}
      policy: {type: str, choices: [bind, preferred, interleave], default: bind, description: Memory policy.}
  hugepages: {type: str, choices: ["any", "2", "1024"], description: "Huge pages in MiB. Root only."}
  affinity: {type: str, description: "Host CPUs the VM may use. Root only."}
  mmio64_mib: {type: int, description: "Size of the firmware's 64-bit MMIO window in MiB. Root only."}
  p2p_clique:
    {type: int, description: "GPUDirect clique id, 0 to 15. Root only; prove first that peer copies arrive."}
  extra_args: {type: str, description: "Further QEMU arguments. Root only."}
  root_path:
    type: str
    choices: [none, password, ssh]
    default: none
    description:
      - How root-only options are set; with V(ssh) they are returned in RV(root_set) and RV(root_delete),
        and the VM is not started before they are set.
  storage: {type: str, description: "Storage of the boot disk; required unless O(state=absent)."}
  efi_storage: {type: str, description: "Storage of the EFI variables; O(storage) by default."}
  cloudinit_storage: {type: str, description: "Storage of the cloud-init drive; O(storage) by default."}
  disk_gib: {type: int, default: 200, description: Size of the boot disk in GiB; grown only.}
  image_volid:
    {type: str, description: "Image to import, as C(local:import/noble.qcow2); needed to make a VM that is started."}
  image_url: {type: str, description: Where the node downloads the image when it is not there.}
  image_checksum: {type: str, description: "Its checksum, as C(sha256:HEX)."}
  secure_boot: {type: bool, default: false, description: Enroll Microsoft's keys when the EFI disk is made.}
  bridge: {type: str, default: vmbr0, description: Bridge of the network device.}
  mac: {type: str, description: MAC address; kept as it is when not given.}
  vlan: {type: int, description: VLAN tag.}
  ipconfig: {type: str, default: "ip=dhcp", description: "Address for cloud-init, as C(ip=A/N,gw=A)."}
  nameservers: {type: list, elements: str, default: [], description: Name servers for cloud-init.}
  searchdomain: {type: str, description: Search domain for cloud-init.}
  ciuser: {type: str, default: ubuntu, description: User that cloud-init makes.}
  sshkeys: {type: list, elements: str, default: [], description: Public keys of that user.}
  ciupgrade: {type: bool, default: false, description: Upgrade all packages at the first boot.}
  agent: {type: bool, default: true, description: Enable the channel of the QEMU guest agent.}
  onboot: {type: bool, default: true, description: Start with the node.}
  protection: {type: bool, default: true, description: Proxmox's protection against removal.}
  allow_restart: {type: bool, default: false, description: Restart a running VM that has pending changes.}
  force_stop: {type: bool, default: false, description: Stop hard when a shutdown times out.}
  start_timeout_seconds:
    {type: int, description: "Limit of a start in seconds; GiB of memory x 4 (300 at least) by default."}
  shutdown_timeout_seconds: {type: int, default: 300, description: Limit of a shutdown in seconds.}
  task_timeout_seconds: {type: int, default: 1800, description: Limit of every other task in seconds.}
  address_timeout_seconds:
    {type: int, default: 0, description: How long to ask the guest agent for an address when none is fixed.}
  confirm_destroy: {type: str, default: "", description: "The VM's name, to destroy it."}
  destroy_with_snapshots: {type: bool, default: false, description: Destroy a VM that has snapshots.}
  destroy_unreferenced: {type: bool, default: false, description: Destroy its unreferenced disks too.}
"""

EXAMPLES = r"""
- name: A VM with eight GPUs
  pve_gpu_vm:
    api_host: pve1.example.com
    api_user: ansible@pve
    api_token_id: gpu
    api_token_secret_file: ~/.config/pve-token
    ca_path: ~/.config/pve-root-ca.pem
    node: pve1
    vmid: 200
    name: llm1
    owner_id: inference-team
    gpus: [{mapping: gpu0}, {mapping: gpu1}, {mapping: gpu2}, {mapping: gpu3},
           {mapping: gpu4}, {mapping: gpu5}, {mapping: gpu6}, {mapping: gpu7}]
    cores: 64
    memory_mib: 524288
    storage: local-zfs
    image_volid: local:import/noble.qcow2
    sshkeys: ["{{ lookup('ansible.builtin.file', '~/.ssh/id_ed25519.pub') }}"]

- name: Destroy it
  pve_gpu_vm:
    api_host: pve1.example.com
    api_user: ansible@pve
    api_token_id: gpu
    api_token_secret_file: ~/.config/pve-token
    node: pve1
    vmid: 200
    name: llm1
    owner_id: inference-team
    state: absent
    confirm_destroy: llm1
"""

RETURN = r"""
vm:
  description: vmid, name, node, status, pending (keys that wait for a restart), address (or null).
  returned: success
  type: dict
created:
  description: Whether the VM was made by this run.
  returned: success
  type: bool
restart_required:
  description: Whether the running VM has changes that take effect with its next start.
  returned: success
  type: bool
root_set:
  description: Root-only options still to set on the node, with O(root_path=ssh).
  returned: success
  type: dict
root_delete:
  description: Root-only options still to remove on the node, with O(root_path=ssh).
  returned: success
  type: list
  elements: str
findings:
  description: "What the checks found: severity, subject, wanted, found, fix; reboot means nothing here."
  returned: always
  type: list
  elements: dict
requests:
  description: Every request made, by method and path.
  returned: always
  type: list
  elements: dict
writes:
  description: How many of them were not reads.
  returned: always
  type: int
"""

import os
import re
import traceback
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sm120.pve_apply import Outcome, Refused, run
from ansible.module_utils.sm120.pve_client import Auth, Client, PveError, Tls, address_problem, pinned
from ansible.module_utils.sm120.pve_spec import ARGUMENTS, VmSpec

# A token goes into a header, a password into a form: neither may hold a line end, and it must not be shown.
FORMS = {
    "api_token_secret": ("printable ASCII without blanks", re.compile(r"[\x21-\x7e]*")),
    "api_password": ("printable characters", re.compile(r"[^\x00-\x1f\x7f\ufffd]*")),
    "api_user": ("printable ASCII without blanks", re.compile(r"[\x21-\x7e]*")),
    "api_token_id": ("printable ASCII without blanks", re.compile(r"[\x21-\x7e]*")),
}


def _one_line(module: AnsibleModule, name: str, text: str) -> str:
    """The text without blanks around it; refused, and not shown, when it is more than one line."""
    text = text.strip()
    form, pattern = FORMS[name]
    good = pattern.match(text)
    position = 0 if good is None else good.end()
    if position < len(text):
        what = "a line end" if text[position] in "\r\n" else "something else"
        module.fail_json(
            msg=f"{name}: wanted one line of {form}; found {len(text)} characters, {what} at position "
            f"{position + 1}. Fix: give the value alone"
        )
    return text


def _secret(module: AnsibleModule, name: str) -> str | None:
    """A secret given as text, by the file that holds it or by the environment; hidden from every output."""
    secret = (module.params[name] or "").strip()
    path = module.params[f"{name}_file"]
    if not secret and path:
        try:
            secret = Path(path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError as problem:
            module.fail_json(msg=f"{name}_file: {problem}")
    secret = secret or os.environ.get(f"PVE_{name.upper()}", "").strip()
    if not secret:
        return None
    module.no_log_values.add(secret)
    return _one_line(module, name, secret)


def _auth(module: AnsibleModule) -> Auth:
    user = _one_line(module, "api_user", module.params["api_user"])
    token = _one_line(module, "api_token_id", module.params["api_token_id"] or "") or None
    needed = "api_password" if token is None else "api_token_secret"
    secret = _secret(module, needed)
    if secret is None:
        variable = f"PVE_{needed.upper()}"
        module.fail_json(
            msg=f"wanted the secret of {token or user}; found none. "
            f"Fix: give {needed} or {needed}_file (to the role: pve_gpu_vm_{needed} and so on) or set the "
            f"environment variable {variable}"
        )
    if token is None:
        return Auth(user, password=secret)
    return Auth(user, token_id=token, token_secret=secret)


def _answer(outcome: Outcome, client: Client) -> dict[str, Any]:
    return {
        "changed": outcome.changed,
        "vm": outcome.vm,
        "created": outcome.created,
        "restart_required": outcome.restart_required,
        "root_set": outcome.root_set,
        "root_delete": outcome.root_delete,
        "findings": [item.as_dict() for item in outcome.findings],
        "requests": client.requests,
        "writes": client.writes,
    }


def _client(module: AnsibleModule) -> Client:
    params = module.params
    wrong = address_problem(params["api_host"], params["api_port"], params["request_timeout_seconds"])
    if wrong:
        module.fail_json(msg=wrong)
    auth = _auth(module)
    try:
        tls = Tls(params["validate_certs"], params["ca_path"], pinned(params["fingerprint"]))
        client = Client(params["api_host"], params["api_port"], auth, tls, params["request_timeout_seconds"])
    except OSError as problem:  # the CA file
        module.fail_json(msg=f"ca_path {params['ca_path']}: {problem}")
    except ValueError as problem:
        module.fail_json(msg=f"fingerprint: {problem}")
    if not params["validate_certs"] and tls.fingerprint is None:
        module.warn("The API's certificate is not verified: give ca_path or fingerprint instead.")
    return client


def _run(module: AnsibleModule) -> None:
    client = _client(module)
    try:
        outcome = run(
            client,
            VmSpec.from_params(module.params),
            check_mode=module.check_mode,
            address_timeout_seconds=module.params["address_timeout_seconds"],
        )
    except Refused as refused:
        found = [item.as_dict() for item in refused.findings]
        module.fail_json(msg=str(refused), findings=found, requests=client.requests, writes=client.writes)
    except PveError as problem:
        module.fail_json(msg=str(problem), findings=[], requests=client.requests, writes=client.writes)
    answer = _answer(outcome, client)
    for item in outcome.findings:
        module.warn(f"{item.subject}: wanted {item.wanted}; found {item.found}. Fix: {item.fix}")
    if module._diff:
        answer["diff"] = {"before": outcome.before, "after": outcome.after}
    module.exit_json(**answer)


def main() -> None:
    """Entry point."""
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    try:
        _run(module)
    except Exception as problem:  # its text may quote a header, so only its kind and place are told
        place = traceback.extract_tb(problem.__traceback__)[-1]
        module.fail_json(
            msg=f"{type(problem).__name__} in {place.name}, {Path(place.filename).name}:{place.lineno}: "
            "an error of this module, please report it; run it again to go on"
        )


if __name__ == "__main__":
    main()
