#!/bin/sh
# The guest's first process. Makes the host's file system the root, with all writes kept in memory and lost at the end,
# but for the folders that the host shares for writing; then hands over to stage.sh in the run's folder.
b=/bin/busybox
die() { echo "xtask: the guest cannot start: $*" >/dev/console; $b poweroff -f; }

$b mount -t devtmpfs dev /dev
$b mount -t proc proc /proc
$b mount -t sysfs sys /sys
for module in /modules/*.ko; do
    case $module in *-dummy.ko) options=numdummies=0 ;; *) options= ;; esac
    $b insmod "$module" $options 2>/dev/console || echo "xtask: $module was not loaded" >/dev/console
done

options=trans=virtio,version=9p2000.L,msize=512000
$b mount -t 9p -o "ro,cache=loose,$options" root /lower || die "no host file system"
$b mount -t tmpfs -o mode=755 over /over
$b mkdir /over/upper /over/work
$b mount -t overlay -o lowerdir=/lower,upperdir=/over/upper,workdir=/over/work overlay /root || die "no overlay"

# The command line names the run's folder, hex-encoded, which holds the list of shared folders.
for word in $($b cat /proc/cmdline); do
    case $word in xtask.run=*) run=$(echo "${word#xtask.run=}" | $b xxd -r -p) ;; esac
done
i=0
while read -r folder; do
    $b mkdir -p "/root$folder"
    $b mount -t 9p -o "rw,cache=mmap,$options" "share$i" "/root$folder" || die "no shared folder $folder"
    i=$((i + 1))
done <"/lower$run/shares"

for folder in dev proc sys; do $b mount --move /$folder /root/$folder || die "/$folder does not exist on the host"; done
exec $b switch_root /root /bin/sh "$run/stage.sh" "$run"
