#!/bin/bash
# Run a command of this checkout in a virtual machine with a pure cgroup v2 hierarchy: for the limits that a machine
# with v1, or with no right to make groups, cannot show. Never part of the test suite.
#
#   tests/vm/run.sh KERNEL root|user COMMAND...
#
# KERNEL: a Debian kernel package, unpacked:
#   apt-get download linux-image-6.1.0-57-amd64 && dpkg -x linux-image-*.deb KERNEL
# root: the command runs in the root group. user: as uid 1000 in a group delegated to it, as a systemd scope with
# Delegate=yes is. The host's files are the guest's root, read-only (9p) under a tmpfs; nothing is written back.
# Needs qemu-system-x86, busybox-static and cpio. Emulates the processor (some minutes for a few tests) unless SWEL_VM_KVM
# is set. Exits as the command did.
set -euo pipefail
[ $# -ge 3 ] && [[ $2 = root || $2 = user ]] || { sed -n '2,12s/^# \?//p' "$0"; exit 2; }
for part in qemu-system-x86_64:qemu-system-x86 busybox:busybox-static cpio:cpio; do
    command -v "${part%%:*}" >/dev/null || { echo "no ${part%%:*} here: apt-get install ${part##*:}"; exit 2; }
done
here=$(cd "$(dirname "$0")" && pwd)
kernel=$(realpath "$1") mode=$2
shift 2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
image=$(echo "$kernel"/boot/vmlinuz-*)
version=${image##*/vmlinuz-}
[ -f "$image" ] || { echo "no boot/vmlinuz-* in $kernel: give it an unpacked kernel package"; exit 2; }

# An initramfs of busybox and the few modules that a 9p root and overlays need.
mkdir -p "$work"/root/{bin,dev,proc,sys,low,rw,new}
cp "$(command -v busybox)" "$work/root/bin/busybox"
[ -f "$kernel/lib/modules/$version/modules.dep.bin" ] || depmod -b "$kernel" "$version"
for module in virtio_pci 9pnet_virtio 9p overlay; do
    modprobe -d "$kernel" -S "$version" --show-depends "$module" | awk '$1 == "insmod" {print $2}'
done | awk '!seen[$0]++' >"$work/modules"
while read -r file; do
    cp "$file" "$work/root/"
    basename "$file" >>"$work/root/order"
done <"$work/modules"
printf '#!/bin/bash\ncd %q && exec %s\n' "$(dirname "$(dirname "$here")")" "$(printf '%q ' "$@")" >"$work/root/command"
cat >"$work/root/init" <<END
#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
while read -r file; do insmod "/\$file"; done </order
mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=262144,cache=loose host /low
mount -t tmpfs rw /rw; mkdir /rw/up /rw/work
mount -t overlay -o lowerdir=/low,upperdir=/rw/up,workdir=/rw/work overlay /new
cp /command /new/command; chmod 755 /new/command
umount /proc /sys; mount --move /dev /new/dev
exec switch_root /new /bin/bash $here/inside.sh $mode
END
chmod 755 "$work/root/init"
(cd "$work/root" && find . | cpio -o -H newc --quiet | gzip -1) >"$work/initrd"

cpu=(-accel tcg -cpu max)
[ -n "${SWEL_VM_KVM:-}" ] && cpu=(-accel kvm -cpu host)
nice -n 10 timeout "${SWEL_VM_TIMEOUT_S:-600}" qemu-system-x86_64 "${cpu[@]}" -smp 1 -m 3072 -nodefaults -no-reboot \
    -kernel "$image" -initrd "$work/initrd" -append "console=ttyS0 quiet panic=-1" -display none -serial stdio \
    -fsdev "local,id=host,path=/,security_model=none,readonly=on,multidevs=remap" \
    -device virtio-9p-pci,fsdev=host,mount_tag=host </dev/null | tr -d '\r' | tee "$work/said"
exit "$(sed -n 's/^vm: exit //p' "$work/said" | tail -1 | grep . || echo 1)"
