# The front door. Each rule installs what is missing and then runs one command of `cargo xtask`.

XTASK := scripts/cargo xtask

.PHONY: help run run-hosted package test bench bench-previrt bench-hosted bench-tools bench-pods bench-vtlb bench-arm64 image check clean setup

help:
	@echo "make run      build Parador and boot three guests on an emulated machine, on this terminal"
	@echo "make run ARCH=arm64  the same on an emulated AArch64 machine"
	@echo "make run-hosted  build a Linux kernel and boot it as processes of this host"
	@echo "make package  build the Debian package of parador"
	@echo "make test     run every test: units, device scripts, micro-guests, Linux boots"
	@echo "make bench    measure and compare with native Linux, KVM and Xen"
	@echo "make bench-previrt  measure what it costs a kernel to be pre-virtualized"
	@echo "make bench-hosted  time programs in processes of this host, beside QEMU and User-Mode Linux"
	@echo "make bench-tools  measure the package: size, time to the first VM, time of a command"
	@echo "make bench-pods  measure containers and pods beside runc, crun and runsc"
	@echo "make bench-vtlb  measure guests without nested paging, optimisation by optimisation"
	@echo "make bench-arm64  measure exits and interrupts of a guest on AArch64"
	@echo "make image    build a bootable ISO image"
	@echo "make check    format, lints, import rules, unsafe counts, generated documents, wording"
	@echo "make clean    remove everything that was built"

# Kernel developers export an ARCH of their own: only that of the command line counts.
run: setup
	@$(XTASK) run $(if $(filter command,$(origin ARCH)),$(ARCH))

run-hosted package test bench image check: setup
	@$(XTASK) $@

bench-previrt: setup
	@$(XTASK) bench previrt

bench-hosted: setup
	@$(XTASK) bench hosted

bench-tools: setup
	@$(XTASK) bench tools

bench-pods: setup
	@$(XTASK) bench pods

bench-arm64: setup
	@$(XTASK) bench arm64

bench-vtlb: setup
	@$(XTASK) bench vtlb

setup:
	@./install.sh
	@test -d target || echo "building the build tool (cargo xtask) first, which takes a minute"

clean:
	rm -rf target
