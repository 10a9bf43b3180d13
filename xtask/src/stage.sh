# The guest's second half, run by the host's own shell and tools: brings the devices up, then runs the command.
run=$1
busybox=$(cat "$run/busybox")
PATH=$PATH:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
say() { echo "xtask: $*" >/dev/console; }
leave() { echo "$1" >"$run/status"; "$busybox" poweroff -f; }
# An error before the command runs is a failure of the guest, told by the file `trouble`.
trouble() { say "$*"; echo "$*" >"$run/trouble"; leave 125; }

mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs -o mode=1777 shm /dev/shm
mount -t tmpfs -o mode=1777 tmp /run/lock 2>/dev/null
ln -sf /proc/self/fd /dev/fd
ln -sf /proc/self/fd/0 /dev/stdin
ln -sf /proc/self/fd/1 /dev/stdout
ln -sf /proc/self/fd/2 /dev/stderr
for port in /sys/class/virtio-ports/*; do
    case $(cat "$port/name") in
        xtask.out) out=/dev/${port##*/} ;;
        xtask.err) err=/dev/${port##*/} ;;
    esac
done
: >"$run/booted"

ip link set lo up || trouble "ip cannot set lo up"
for i in 0 1; do
    ip link add "d$i" mtu 9000 type dummy || trouble "ip cannot add a dummy network device"
    ip addr add "10.9.$i.1/24" dev "d$i" || trouble "ip cannot give d$i an address"
    ip link set "d$i" up || trouble "ip cannot set d$i up"
    rdma link add "rxe$i" type rxe netdev "d$i" || trouble "rdma cannot add the soft-RoCE device rxe$i"
done
# The nodes appear a moment after the device.
tries=0
until [ -c /dev/infiniband/uverbs0 ] && [ -c /dev/infiniband/uverbs1 ]; do
    tries=$((tries + 1))
    [ $tries -gt 1000 ] && trouble "/dev/infiniband/uverbs* did not appear"
    "$busybox" usleep 10000
done
chmod 666 /dev/infiniband/uverbs* /dev/infiniband/rdma_cm 2>/dev/null

sh "$run/command.sh" </dev/null >"$out" 2>"$err"
leave $?
