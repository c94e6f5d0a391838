"""The numpy target: runs any plan anywhere, slowly."""
