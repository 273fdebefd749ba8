#!/usr/bin/python
"""Look at a Proxmox VE host's boot loader, kernel parameters, GPUs and IOMMU groups."""

from __future__ import annotations

DOCUMENTATION = r"""
module: pve_host_info
short_description: What a Proxmox VE host says about GPU passthrough
description:
  - Reads files below /proc, /sys and /etc and asks C(proxmox-boot-tool status); changes nothing.
attributes:
  check_mode:
    support: full
    description: Never changes anything.
  diff_mode:
    support: none
    description: Never changes anything.
options:
  gpu_ids:
    {type: list, elements: str, default: ["10de:2bb5", "10de:2bb1"], description: PCI ids of GPUs.}
  gpu_count: {type: int, default: 1, description: How many GPUs there must be at least.}
  accept_group_members:
    {type: bool, default: false, description: "Other devices in a GPU's IOMMU group are a warning only."}
  removable:
    {type: list, elements: str, default: [], description: Bad parameters that will be removed.}
  active: {type: list, elements: str, default: [], description: Parameters that the running kernel must have.}
  after:
    {type: bool, default: false, description: "Check O(active), groups and drivers too: after the reboot."}
"""

EXAMPLES = r"""
- name: Look at the host
  pve_host_info:
    gpu_count: 8
"""

RETURN = r"""
loaders:
  description: "Boot loaders that count here: name, path, kind, refresh (programs to run after a change)."
  returned: always
  type: list
  elements: dict
parameters:
  description: Parameters of the kernel that runs.
  returned: always
  type: list
  elements: str
gpus:
  description: "GPUs: address, device_id, driver, iommu_group, strangers, answers, bar_mib."
  returned: always
  type: list
  elements: dict
phys_bits:
  description: Physical address bits of the processor; null when not told.
  returned: always
  type: int
modules:
  description: Modules that are loaded at boot, by file.
  returned: always
  type: dict
intel_iommu_needed:
  description: Whether the kernel needs intel_iommu=on (Intel, Linux before 6.8).
  returned: always
  type: bool
boot_lines:
  description: "What the boot loaders' files give the next kernel: where, parameters, editable, problem."
  returned: always
  type: list
  elements: dict
newer_than_boot:
  description: Whether a file that a boot reads was changed since the last one.
  returned: always
  type: bool
reboot_required:
  description: Whether something found with O(after) is what a reboot would mend.
  returned: always
  type: bool
grub_overrides:
  description: Files that set GRUB's command line anew.
  returned: always
  type: list
  elements: str
findings:
  description: "What is wrong: severity, subject, wanted, found, fix, reboot (whether one would mend it)."
  returned: always
  type: list
  elements: dict
problem:
  description: The findings that forbid to go on, as text; empty when there are none.
  returned: always
  type: str
"""

import subprocess
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sm120.pve_finding import errors, render
from ansible.module_utils.sm120.pve_host_scan import findings, scan

TOOL_SECONDS = 120  # it mounts one partition after the other


def boot_status(module: AnsibleModule) -> str:
    """What proxmox-boot-tool says; nothing where it is not installed."""
    tool = module.get_bin_path("proxmox-boot-tool")
    if tool is None:
        return ""
    try:
        done = subprocess.run(
            [tool, "status"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TOOL_SECONDS,
        )
    except subprocess.TimeoutExpired:
        module.fail_json(
            msg=f"Wanted: an answer of {tool} status. Found: none in {TOOL_SECONDS} s. Look at: dmesg | tail -50"
        )
    return done.stdout


def main() -> None:
    """Entry point."""
    module = AnsibleModule(
        argument_spec={
            "gpu_ids": {"type": "list", "elements": "str", "default": ["10de:2bb5", "10de:2bb1"]},
            "gpu_count": {"type": "int", "default": 1},
            "accept_group_members": {"type": "bool", "default": False},
            "removable": {"type": "list", "elements": "str", "default": []},
            "active": {"type": "list", "elements": "str", "default": []},
            "after": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    params = module.params
    seen = scan(Path("/"), params["gpu_ids"], boot_status(module))
    found = findings(
        seen,
        count=params["gpu_count"],
        removable=params["removable"],
        accept_group_members=params["accept_group_members"],
        active=params["active"],
        after=params["after"],
    )
    for item in found:
        if item.severity == "warning":
            module.warn(render([item]))
    module.exit_json(
        changed=False,
        findings=[item.as_dict() for item in found],
        problem=render(errors(found)),
        reboot_required=any(item.reboot for item in found),
        **seen,
    )


if __name__ == "__main__":
    main()
