#!/bin/sh
# kubernetes.sh FOLDER: builds kube-apiserver, kubelet and kubectl in FOLDER/bin from their modules
# of the Go proxy, whose checksums Go's database confirms, and gets etcd from Debian. Needs curl and
# unzip where there is no Go of version 1.24 or later.
set -eu
VERSION=1.34.4
GO=1.24.11
mkdir -p "$1/bin" "$1/source"
cd "$1"
folder=$PWD

apt-get download -q etcd-server
dpkg-deb --fsys-tarfile etcd-server_*.deb | tar -xf - -C bin --strip-components=3 ./usr/bin/etcd
rm etcd-server_*.deb

export GOMODCACHE="$folder/modules" GOCACHE="$folder/cache" GOFLAGS=-mod=mod CGO_ENABLED=0 GOTOOLCHAIN=local
export PATH="$folder/go/bin:$PATH:/usr/local/go/bin"
minor=$(go env GOVERSION 2>/dev/null | sed -n 's/^go1\.\([0-9]*\).*/\1/p')
if [ "${minor:-0}" -lt 24 ]; then
    # A toolchain is a module, too, with its files below this name.
    name=golang.org/toolchain@v0.0.1-go$GO.linux-amd64
    curl -fsS -o go.zip "https://proxy.golang.org/golang.org/toolchain/@v/${name#*@}.zip"
    rm -rf go unpacked
    unzip -q go.zip -d unpacked
    mv "unpacked/$name" go
    rm -rf go.zip unpacked
    chmod -R u+x go/bin go/pkg/tool
fi

cd source
# Kubernetes' own modules replace each other by folders of its repository, which the proxy has as
# modules.
cat >go.mod <<END
module parador.test/kubernetes
go 1.24.0
require k8s.io/kubernetes v$VERSION
END
for module in api apiextensions-apiserver apimachinery apiserver cli-runtime client-go \
    cloud-provider cluster-bootstrap code-generator component-base component-helpers \
    controller-manager cri-api cri-client csi-translation-lib dynamic-resource-allocation \
    endpointslice externaljwt kms kube-aggregator kube-controller-manager kube-proxy \
    kube-scheduler kubectl kubelet metrics mount-utils pod-security-admission \
    sample-apiserver; do
    echo "replace k8s.io/$module => k8s.io/$module v0.${VERSION#1.}" >>go.mod
done
package=k8s.io/component-base/version
for program in kubectl kubelet kube-apiserver; do
    echo "building $program"
    go build -trimpath -ldflags "-s -w -X $package.gitVersion=v$VERSION" -o "../bin/$program.new" \
        "k8s.io/kubernetes/cmd/$program"
    mv "../bin/$program.new" "../bin/$program"
done

# They can be had again; the programs cannot as fast.
go clean -cache -modcache
rm -rf go source
