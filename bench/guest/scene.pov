// Glass, mirrors and shadows: what takes a ray tracer time.
#version 3.7;
global_settings { assumed_gamma 1 max_trace_level 8 }
camera { location <0, 3, -9> look_at <0, 1, 0> }
light_source { <6, 9, -7> rgb 1 area_light <1, 0, 0>, <0, 1, 0>, 3, 3 }
light_source { <-8, 5, -3> rgb 0.4 }
plane { y, 0 pigment { checker rgb 1, rgb 0.2 } finish { reflection 0.2 } }
#declare Row = -2;
#while (Row <= 2)
    #declare Column = 0;
    #while (Column <= 3)
        difference {
            sphere { <Row * 1.6, 1, Column * 1.8>, 0.75 }
            cylinder { <Row * 1.6, -1, Column * 1.8>, <Row * 1.6, 3, Column * 1.8>, 0.3 }
            #if (mod(Row + Column, 2) = 0)
                pigment { rgbf <0.9, 1, 0.95, 0.8> } interior { ior 1.5 } finish { specular 0.6 reflection 0.1 }
            #else
                pigment { granite scale 0.5 } finish { phong 0.8 reflection 0.3 }
            #end
        }
        #declare Column = Column + 1;
    #end
    #declare Row = Row + 1;
#end
