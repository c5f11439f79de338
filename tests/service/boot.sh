# Becomes systemd as process 1 of namespaces of its own, on a copy of this machine's files that ends with it:
# boot.sh FILES GROUP SHARED. FILES lies over the machine's files, GROUP is a new control group's name, and SHARED is a
# directory that the services see as /run/shared.
set -e
files=$1 group=$2 shared=$3
mount --make-rprivate /
root=$shared/root
mkdir "$root" "$shared/over"
mount -t tmpfs none "$shared/over"
mkdir "$shared/over/upper" "$shared/over/work"
mount -t overlay -o "lowerdir=$files:/,upperdir=$shared/over/upper,workdir=$shared/over/work" overlay "$root"

mount -t proc proc "$root/proc"
# Nothing here sets what the machine's kernel does.
mount --bind "$root/proc/sys" "$root/proc/sys"
mount -o remount,bind,ro "$root/proc/sys"
mount -t tmpfs none "$root/dev"
mkdir "$root/dev/shm"
for name in null zero full random urandom; do
  touch "$root/dev/$name"
  mount --bind "/dev/$name" "$root/dev/$name"
done
for dir in run tmp dev/shm; do
  mount -t tmpfs -o mode=1777 none "$root/$dir"
done
mkdir "$root/run/shared"
mount --bind "$shared" "$root/run/shared"

# Hierarchies of control groups are where the machine has them, from this group on. Without the others of version 1 systemd
# works as well, and a group of cpuset takes no process before it is set up.
mount -t sysfs -o ro sysfs "$root/sys"
while read -r _ point kind options _; do
  case "$kind,$options," in
    cgroup2,* | cgroup,*,memory,* | cgroup,*,devices,* | cgroup,*,pids,* | cgroup,*,name=systemd,*) ;;
    *) continue ;;
  esac
  mkdir -p "$point/$group"
  echo $$ >"$point/$group/cgroup.procs"
  echo "$point $kind $options" >>"$shared/groups"
done </proc/mounts
exec unshare --cgroup sh -e -c '
  root=$1 shared=$2
  if ! grep -q "^/sys/fs/cgroup " "$shared/groups"; then
    mount -t tmpfs none "$root/sys/fs/cgroup"
  fi
  while read -r point kind options; do
    mkdir -p "$root$point"
    mount -t "$kind" -o "$(echo "$options" | sed -E "s/(^|,)(rw|ro|relatime|nosuid|nodev|noexec|nsdelegate|memory_recursiveprot)//g; s/^,//")" \
      none "$root$point"
  done <"$shared/groups"
  cd "$root"
  mkdir -p run/old
  pivot_root . run/old
  umount -l /run/old
  exec env -i container=other PATH=/usr/sbin:/usr/bin:/sbin:/bin \
    /lib/systemd/systemd --system --unit=test.target --log-target=null
' sh "$root" "$shared"
