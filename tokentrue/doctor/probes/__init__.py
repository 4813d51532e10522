"""One file per family of probes; each probe returns findings and changes nothing."""
