# Traces commands in a guest with bpftrace and perf: tracepoints, kernel functions with the types of
# BTF, return probes with a histogram, a function of a program, and system calls by name.
set -e
echo contents >/tmp/trace-me
bpftrace -c '/bin/cat /tmp/trace-me' -e 'tracepoint:syscalls:sys_enter_openat
    /comm == "cat" && str(args->filename) == "/tmp/trace-me"/ { printf("openat by %s: 1\n", comm); }'
bpftrace -c '/bin/cat /tmp/trace-me' -e 'kprobe:vfs_open { $path = (struct path *)arg0;
    $name = str($path->dentry->d_name.name); if ($name == "trace-me") { printf("vfs_open of %s\n", $name); } }'
bpftrace -c '/usr/bin/head -c 1 /tmp/trace-me' -e 'kfunc:vfs_read /comm == "head" && args->count == 1/ { @reads[comm] = count(); }'
bpftrace -c '/bin/cat /tmp/trace-me' -e 'kprobe:do_sys_openat2 { @start[tid] = nsecs; }
    kretprobe:do_sys_openat2 /@start[tid]/ { @opened_us = hist((nsecs - @start[tid]) / 1000); delete(@start[tid]); }'
bpftrace -c '/bin/bash -c :' -e 'uprobe:/bin/bash:main { printf("main of %s: 1\n", comm); }'
perf trace -e openat cat /tmp/trace-me 2>&1
