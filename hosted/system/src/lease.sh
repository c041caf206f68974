#!/bin/sh
# DHCP lease script for busybox udhcpc: `udhcpc -i eth0 -n -q` sets address, route and name servers.
case $1 in
deconfig)
    ifconfig "$interface" 0.0.0.0
    ;;
bound | renew)
    ifconfig "$interface" "$ip" netmask "${subnet:-255.255.255.0}"
    if [ -n "$router" ]; then
        while route del default dev "$interface" 2>/dev/null; do :; done
        for gateway in $router; do route add default gw "$gateway" dev "$interface"; done
    fi
    for server in $dns; do echo "nameserver $server"; done >/etc/resolv.conf
    ;;
esac
