// The threads that gRPC makes.
#ifndef FLASHCORE_SERVER_TRANSPORT_GRPC_GRPC_THREADS_H_
#define FLASHCORE_SERVER_TRANSPORT_GRPC_GRPC_THREADS_H_

namespace flashcore::server {

// How many at most, in a process with one server: at its start, and later as its queues grow.
//
// gRPC 1.51 sizes its pools by the machine's cores, and by 2 for each of them it may add threads.
// grpc_threads.cc replaces what it asks: it sees the cores that this process may use, at most
// 32, beyond which only the number of idle threads would grow.
int GrpcThreads();

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_GRPC_GRPC_THREADS_H_
