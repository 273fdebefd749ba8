"""What the modules in library/ share: typed functions that know nothing of AnsibleModule."""
